"""Machines that are not here: complete, consistent with the recipe, found by any spelling of their id."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from k3hal.dispatch.describe import describe, described_as, described_ids, features_of_arch
from k3hal.dispatch.errors import UsageError

RECIPE_GB = {  # per device
    "h100": 80, "h200": 141, "b200": 180, "b300": 268, "gb200": 192, "gb300": 288,
    "mi300x": 192, "mi325x": 256, "mi355x": 288, "ascend_910c": 64,
}  # fmt: skip
OTHERS = {"ascend_910b", "ascend_950", "cpu"}
VENDOR_OF = {"sm": "nvidia", "gfx": "amd", "ascend": "ascend"}


def test_the_pinned_ids_are_described() -> None:
    assert set(described_ids()) == set(RECIPE_GB) | OTHERS


@pytest.mark.parametrize("name", described_ids())
def test_a_description_is_complete(name: str) -> None:
    device = describe(name)
    assert device.id == name
    assert device.title
    assert device.source
    assert not device.present
    assert device.memory_bytes == RECIPE_GB.get(name, device.memory_bytes / 1e9) * 1e9
    if name == "cpu":
        return
    assert device.vendor == next(vendor for prefix, vendor in VENDOR_OF.items() if device.arch.startswith(prefix))
    assert device.arch_number > 0
    assert device.memory_bytes > 0
    assert device.bandwidth > 1e12
    assert set(device.flops) <= {"float32", "bfloat16", "fp8", "fp4"}
    assert ("fp8" in device.flops) == ("fp8" in device.features)
    assert ("fp4" in device.flops) == ("mxfp4_native" in device.features)
    assert "torch" in device.packages
    assert any("claim" in note.lower() for note in device.notes)


def test_rates_rise_as_the_type_narrows() -> None:
    for name in described_ids():
        rates = [describe(name).flops[t] for t in ("float32", "bfloat16", "fp8", "fp4") if t in describe(name).flops]
        assert rates == sorted(rates), name


@pytest.mark.parametrize("spelling", ["ascend_910b", "ascend-910b", "Ascend-910B", " ASCEND_910B "])
def test_spellings_of_an_id_are_equal(spelling: str) -> None:
    assert describe(spelling).id == "ascend_910b"


@pytest.mark.parametrize(("word", "near"), [("h10", "h100"), ("mi355", "mi355x"), ("ascend-910", "ascend_910")])
def test_an_unknown_machine_names_the_nearest_and_the_list(word: str, near: str) -> None:
    with pytest.raises(UsageError, match=f"did you mean '{near}.*known: .*b300.*mi300x"):
        describe(word)


@pytest.mark.parametrize(
    ("driver_name", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", "gb200"),
        ("AMD Instinct MI355X", "mi355x"),
        ("Ascend910B3", "ascend_910b"),
        ("Ascend910_9382", "ascend_910c"),
        ("NVIDIA A100-SXM4-80GB", None),
        ("", None),
    ],
)
def test_a_drivers_name_finds_its_description(driver_name: str, name: str | None) -> None:
    found = described_as(driver_name)
    assert (found.id if found else None) == name


def test_features_of_an_architecture_are_those_all_its_chips_have() -> None:
    assert features_of_arch("nvidia", "sm_100") == describe("b200").features
    assert features_of_arch("nvidia", "sm_75") == frozenset()


def test_describing_loads_no_torch() -> None:
    code = (
        "import sys, k3hal.dispatch\n"
        "from k3hal.dispatch import describe, evidence, overrides, plan, plan_file, plan_pin, probe, runtime, select\n"
        "assert probe.resolve_device('mi355x').vendor == 'amd'\n"
        "probe.probe('cpu')\n"
        "print([name for name in ('torch', 'numpy', 'rich', 'k3hal.backends') if name in sys.modules])"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
