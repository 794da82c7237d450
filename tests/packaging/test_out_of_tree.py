"""An installed vendor package is a backend like those in the tree: its provider is chosen, its library loaded late."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

PYPROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "acme-k3hal"
version = "1.2.3"

[project.entry-points."k3hal.backends"]
acme = "acme_k3hal"

[tool.setuptools]
packages = ["acme_k3hal"]
py-modules = ["acme_kernels"]
"""
MANIFEST = '''
"""The backend of a vendor outside the tree."""

from k3hal.dispatch import Backend

BACKEND = Backend(name="acme", vendors=("cpu",), priority=90)
'''
PROVIDER = '''
"""RMSNorm by the vendor's library, which is loaded when the provider runs."""

from k3hal.dispatch import Call, Needs, No, Yes, provides


def _supports(call: Call) -> Yes | No:
    return Yes("by the vendor's kernel") if call.dims.get("dim", 0) % 8 == 0 else No("needs dim divisible by 8")


@provides("rms_norm", name="fused", needs=Needs(packages={"acme_k3hal": ">=1.2"}), supports=_supports)
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
    source, target = tmp_path_factory.mktemp("acme"), tmp_path_factory.mktemp("site")
    package = source / "acme_k3hal"
    package.mkdir()
    (source / "pyproject.toml").write_text(PYPROJECT)
    (source / "acme_kernels.py").write_text(KERNELS)
    (package / "__init__.py").write_text(MANIFEST)
    (package / "norms.py").write_text(PROVIDER)
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
