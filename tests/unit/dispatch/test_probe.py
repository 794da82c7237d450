"""Probing: vendors told apart as torch tells them, an absent driver is none, a broken one an error."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from k3hal.dispatch import host, probe_vendors
from k3hal.dispatch.errors import ProbeError, UnsupportedError, UsageError
from k3hal.dispatch.packages import InstalledPackages
from k3hal.dispatch.probe import present_devices, probe, resolve_device
from k3hal.dispatch.probe_vendors import ascend_arch, gfx_number


def _torch(*, cuda: str | None = None, hip: str | None = None, devices: list[Any] | None = None) -> Any:
    found = devices or []
    return SimpleNamespace(
        __version__="2.14.0",
        version=SimpleNamespace(cuda=cuda, hip=hip),
        cuda=SimpleNamespace(device_count=lambda: len(found), get_device_properties=found.__getitem__),
        npu=SimpleNamespace(device_count=lambda: len(found), get_device_properties=found.__getitem__),
    )


def _gpu(name: str, memory: int, **more: Any) -> Any:
    return SimpleNamespace(name=name, total_memory=memory, **more)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`machine(torch, *nodes)`: this torch, and these driver nodes in /dev."""

    def be(torch: Any, *nodes: str) -> None:
        monkeypatch.setattr(probe_vendors, "_torch", lambda: torch)
        wanted = {probe_vendors._DRIVER_NODES[node] for node in nodes}
        monkeypatch.setattr(probe_vendors, "glob", lambda pattern: [pattern] if pattern in wanted else [])
        for name in {variable for names in probe_vendors._VISIBLE.values() for variable in names}:
            monkeypatch.delenv(name, raising=False)

    return be


def test_the_cpu_is_always_here() -> None:
    device = probe("cpu")
    assert (device.id, device.vendor, device.torch_device, device.present) == ("cpu", "cpu", "cpu", True)
    assert device.memory_bytes > 0
    assert device.packages["pytest"] == pytest.__version__
    assert present_devices()[-1] == device
    assert resolve_device("CPU") == device


def test_nvidia(machine: Any) -> None:
    gpus = [_gpu("NVIDIA H200", 150_000_000_000, major=9, minor=0), _gpu("NVIDIA L4", 24 << 30, major=8, minor=9)]
    machine(_torch(cuda="13.0", devices=gpus), "cuda")
    first, second = (probe(name) for name in ("auto", "cuda:1"))
    assert (first.id, first.vendor, first.arch, first.arch_number) == ("cuda:0", "nvidia", "sm_90", 90)
    assert first.memory_bytes == 150_000_000_000, "the probed figure, not the datasheet's"
    assert first.bandwidth == 4.8e12, "the datasheet's rate of the chip the driver names"
    assert first.packages["cuda"] == "13.0"
    assert "wgmma" in first.features
    assert (second.id, second.torch_device, second.arch_number) == ("cuda:1", "cuda:1", 89)
    assert (second.bandwidth, second.flops, second.features) == (0.0, {}, {"graphs", "fp8"})
    with pytest.raises(UnsupportedError, match=r"no cuda:2 on this machine \(it has cuda:0, cuda:1\)"):
        probe("cuda:2")


def test_amd_is_not_taken_for_nvidia(machine: Any) -> None:
    gpu = _gpu("AMD Instinct MI300X", 192 << 30, gcnArchName="gfx942:sramecc+:xnack-", major=9, minor=4)
    machine(_torch(hip="7.2.26015-fc0d8cf", devices=[gpu]), "rocm")
    device = probe()
    assert (device.id, device.vendor, device.arch, device.arch_number) == ("rocm:0", "amd", "gfx942", 942)
    assert device.torch_device == "cuda:0"
    assert device.packages["rocm"] == "7.2.26015"
    assert "fp8_fnuz" in device.features
    with pytest.raises(UnsupportedError, match="no driver"):
        probe("cuda")


def test_ascend(machine: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine(_torch(devices=[_gpu("Ascend910B3", 64 << 30)]), "npu")
    monkeypatch.setattr(probe_vendors.importlib.util, "find_spec", lambda name: name)
    extension = SimpleNamespace(npu=SimpleNamespace(get_soc_version=lambda: 222))
    monkeypatch.setattr(probe_vendors.importlib, "import_module", lambda name: extension)
    (tmp_path / "x86_64-linux").mkdir()
    (tmp_path / "x86_64-linux" / "ascend_toolkit_install.info").write_text("package_name=toolkit\nversion=8.3.RC1\n")
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    device = probe("npu")
    assert (device.id, device.vendor, device.arch, device.arch_number) == ("npu:0", "ascend", "ascend910b", 220)
    assert (device.torch_device, device.packages["cann"]) == ("npu:0", "8.3.RC1")


def test_an_npu_driver_without_torch_npu_is_no_device(machine: Any) -> None:
    machine(_torch(), "npu")
    with pytest.raises(UnsupportedError, match="torch_npu is not installed"):
        probe("npu")


def test_a_torch_built_without_the_vendor_is_no_device(machine: Any) -> None:
    machine(_torch(), "cuda", "rocm")
    assert [d.id for d in present_devices()] == ["cpu"]
    with pytest.raises(UnsupportedError, match=r"torch 2.14.0 is built without cuda"):
        probe("cuda")


def test_a_crash_is_an_error_and_never_absent(machine: Any) -> None:
    torch = _torch(cuda="13.0")

    def crash() -> int:
        raise RuntimeError("driver too old")

    torch.cuda.device_count = crash
    machine(torch, "cuda")
    for name in ("cuda", "auto"):
        with pytest.raises(ProbeError, match=r"probing cuda devices failed: .*driver too old"):
            probe(name)
    assert probe("cpu").id == "cpu", "a device that was not asked for is not probed"


def test_a_driver_that_shows_no_device_is_an_error_unless_they_are_hidden(
    machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(_torch(cuda="13.0"), "cuda")
    with pytest.raises(ProbeError, match="exists but torch sees no cuda device"):
        probe()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert probe().id == "cpu"
    with pytest.raises(UnsupportedError, match="hidden by CUDA_VISIBLE_DEVICES"):
        probe("cuda")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpu", "unknown device 'gpu'"),
        ("cud", "did you mean 'cuda'"),
        ("", "unknown device ''"),
        ("cuda:", "is not understood"),
        ("cuda:-1", "is not understood"),
        ("cuda:one", "is not understood"),
        ("cpu:0", "is not understood"),
        ("auto:1", "is not understood"),
        ("mi355x", "describes a machine that is not here"),
        ("ascend-910b", "describes a machine that is not here"),
    ],
)
def test_a_word_that_is_no_device_of_this_machine(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        probe(text)


def test_resolving_takes_described_machines_too() -> None:
    assert resolve_device("MI355X").arch == "gfx950"
    with pytest.raises(UsageError, match=r"unknown device 'mi35x' \(did you mean 'mi355x'\? known: .*auto"):
        resolve_device("mi35x")
    with pytest.raises(UsageError, match="no machine is described as 'mi355x:1'"):
        resolve_device("mi355x:1")


@pytest.mark.parametrize(
    ("arch", "number"), [("gfx90a", 909), ("gfx942", 942), ("gfx950", 950), ("gfx1100", 1100), ("gfx1250", 1250)]
)
def test_gfx_numbers_are_ordered(arch: str, number: int) -> None:
    assert gfx_number(arch) == number


def test_a_name_that_is_no_gfx_arch_is_an_error() -> None:
    with pytest.raises(ValueError, match="'sm_90' is not an AMD"):
        gfx_number("sm_90")


@pytest.mark.parametrize(
    ("soc", "arch"),
    [(202, "ascend310p"), (220, "ascend910b"), (225, "ascend910b"), (255, "ascend910c"), (260, "ascend950")],
)
def test_ascend_generations(soc: int, arch: str) -> None:
    assert ascend_arch(soc)[0] == arch
    assert ascend_arch(300) == ("ascend_soc300", 300)


CPUINFO_X86 = (
    "processor\t: 0\nmodel name\t: Some CPU\n"
    "flags\t\t: fpu avx2 fma amx_bf16 amx_tile avx512_bf16 sse2\n\nprocessor\t: 1\n"
)
CPUINFO_ARM = "processor\t: 0\nFeatures\t: fp asimd bf16 i8mm sve\n"


@pytest.mark.parametrize(
    ("text", "features"),
    [
        (CPUINFO_X86, {"avx2", "fma", "amx_bf16", "amx_tile", "avx512_bf16"}),
        (CPUINFO_ARM, {"neon", "bf16", "i8mm", "sve"}),
        ("", set()),
        (None, set()),
    ],
)
def test_cpu_features(text: str | None, features: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if text is not None:
        (tmp_path / "cpuinfo").write_text(text)
    monkeypatch.setattr(host, "_CPUINFO", tmp_path / "cpuinfo")
    assert host.cpu_features() == features
    assert host.cpu_name() == ("Some CPU" if text == CPUINFO_X86 else host.cpu_arch())


@pytest.mark.parametrize("version", [1, 2])
def test_memory_honours_the_tightest_control_group(
    version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit, used, reclaim = host._V1 if version == 1 else host._V2
    base = tmp_path / "memory" if version == 1 else tmp_path
    for folder, bound in ((base / "pod", 1 << 20), (base / "pod" / "job", "max" if version == 2 else 1 << 60)):
        folder.mkdir(parents=True)
        (folder / limit).write_text(f"{bound}\n")
        (folder / used).write_text("300000\n")
        (folder / "memory.stat").write_text(f"anon 200000\n{reclaim} 100000\n")
    own = "4:memory:/pod/job\n" if version == 1 else "0::/pod/job\n"
    (tmp_path / "own").write_text("7:pids:/\n" + own)
    monkeypatch.setattr(host, "_CGROUP", tmp_path / "own")
    monkeypatch.setattr(host, "_CGROUP_ROOT", tmp_path)
    assert host.host_memory() == (1 << 20, (1 << 20) - 200000)


def test_memory_without_control_groups_is_the_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_CGROUP", tmp_path / "none")
    total, free = host.host_memory()
    assert total > free > 0


def test_installed_packages_are_looked_up_by_any_spelling() -> None:
    packages = InstalledPackages()
    assert packages["pytest_timeout"] == packages["Pytest-Timeout"]
    assert "no-such-package" not in packages
    assert "pytest" in list(packages)
    assert len(packages) > 5
