"""An installed vendor package, that of the guide, is a backend like those in the tree: its provider is chosen, its
library loaded late, its device described."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "vendor_example"
# Beside the example's own providers: one that is preferred to the CPU's, and takes its kernels from a library.
PROVIDER = '''
"""RMSNorm by the vendor's library, which is loaded when the provider runs."""

from k3hal.dispatch import Call, Needs, No, Yes, provides


def _supports(call: Call) -> Yes | No:
    return Yes("by the vendor's kernel") if call.dims.get("dim", 0) % 8 == 0 else No("needs dim divisible by 8")


@provides("rms_norm", name="fused", needs=Needs(packages={"k3hal_acme": ">=0.1"}), supports=_supports, priority=90)
def rms_norm(x, weight, eps, residual=None):
    from acme_kernels import fused_rms_norm

    return fused_rms_norm(x, weight, eps, residual)
'''
KERNELS = '''
"""Stands for a vendor's library."""


def fused_rms_norm(x, weight, eps, residual):
    return ("fused", x)
'''
ASK = """
import json, sys
from k3hal.dispatch.assemble import build_selector
from k3hal.dispatch.call import Call
from k3hal.dispatch.errors import K3HALError
from k3hal.dispatch.probe import probe

cpu = probe("cpu")


def ask(ops, dim):
    try:
        return build_selector(ops, "warn").decide(Call("rms_norm", cpu, "float32", dims={"dim": dim}))
    except K3HALError as error:
        return error


wide, odd = ask(None, 64), ask(None, 65)
loaded_early = "acme_kernels" in sys.modules
print(json.dumps({
    "chosen": [wide.provider, odd.provider],
    "why": [line.reasons for line in odd.trace if line.provider == "acme.fused"],
    "loaded_early": loaded_early, "result": wide.function()(1, 2, 1e-5), "loaded": "acme_kernels" in sys.modules,
    "by_backend": ask("rms_norm=acme", 64).provider, "reference": ask("rms_norm=reference", 64).provider,
    "refused": str(ask("rms_norm=fused", 65)), "misspelt": str(ask("rms_norm=acmee", 64)),
}))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the vendor's wheel has been built and installed, without any network."""
    source, target = tmp_path_factory.mktemp("acme") / "k3hal-acme", tmp_path_factory.mktemp("site")
    shutil.copytree(EXAMPLE, source, ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    (source / "acme_k3hal" / "norms.py").write_text(PROVIDER)
    (target / "acme_kernels.py").write_text(KERNELS)
    build = [sys.executable, "-P", "-m", "build", "--wheel", "--no-isolation", "--outdir", "dist", "."]
    done = subprocess.run(build, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (wheel,) = (source / "dist").glob("*.whl")
    # What an installer does with a pure wheel; none need be in the environment.
    zipfile.ZipFile(wheel).extractall(target)
    return target


def _python(site: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run code where the packages in `site` are installed."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(site), *sys.path])}
    environment.pop("K3HAL_OPS", None)
    return subprocess.run(
        [sys.executable, "-P", "-c", code], env=environment, capture_output=True, text=True, check=False
    )


def test_its_provider_is_chosen_and_the_vendors_library_loads_only_when_it_runs(site: Path) -> None:
    done = _python(site, ASK)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["chosen"][0] == told["by_backend"] == "acme.fused"
    assert told["chosen"][1] != "acme.fused"
    assert told["why"] == [["needs dim divisible by 8"]]
    assert (told["loaded_early"], told["loaded"]) == (False, True)
    assert told["result"] == ["fused", 1]
    assert told["reference"] == "reference"
    assert "needs dim divisible by 8" in told["refused"], "an override is refused rather than bent"
    assert "did you mean 'acme'" in told["misspelt"]


DESCRIBED = """
import json
from k3hal.dispatch.describe import describe, described_as, described_ids
from k3hal.dispatch.errors import K3HALError

try:
    found = describe("acme-a1")
    told = [found.vendor, found.present, found.memory_bytes, described_as("Acme A1 rev. 2").id]
    told.append("b200" in described_ids())
except K3HALError as error:
    told = str(error)
print(json.dumps(told))
"""


def test_it_describes_its_device(site: Path) -> None:
    done = _python(site, DESCRIBED)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["acme", False, 96_000_000_000, "acme_a1", True]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda text: text.replace('vendor = "acme"\n', ""), "'vendor' is missing"),
        (lambda text: "bandwith = 1.0\n" + text, "unknown key 'bandwith'"),
        (lambda text: text.replace('id = "acme_a1"', 'id = "a1"'), "id is 'a1'"),
        (lambda text: text + "[", "not TOML"),
    ],
)
def test_a_malformed_description_is_named(site: Path, tmp_path: Path, change: Callable[[str], str], told: str) -> None:
    copy = Path(shutil.copytree(site, tmp_path / "site"))
    file = copy / "acme_k3hal" / "devices" / "acme_a1.toml"
    file.write_text(change(file.read_text()))
    done = _python(copy, DESCRIBED)
    assert done.returncode == 0, done.stderr
    assert "acme_a1.toml" in json.loads(done.stdout) and told in json.loads(done.stdout)


def test_a_device_is_described_once(site: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(site, tmp_path / "site"))
    (copy / "acme_k3hal" / "devices" / "h100.toml").write_text("")
    done = _python(copy, DESCRIBED)
    assert "describes 'h100', and so does" in json.loads(done.stdout)


def test_a_package_that_does_not_import_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "broken_k3hal-1.0.dist-info"
    broken.mkdir()
    (broken / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-k3hal\nVersion: 1.0\n")
    (broken / "entry_points.txt").write_text("[k3hal.backends]\nbroken = broken_k3hal\n")
    (tmp_path / "broken_k3hal.py").write_text("import no_such_library\n")
    done = _python(tmp_path, "from k3hal.cli import main; raise SystemExit(main(['op', 'list', '--device', 'cpu']))")
    assert done.returncode == 3
    assert "k3hal: error: backend broken (broken_k3hal) cannot be imported: ModuleNotFoundError" in done.stderr
    assert "Traceback" not in done.stderr
