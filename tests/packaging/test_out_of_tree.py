"""An installed vendor package is a backend like those in the tree: its provider is chosen, its library loaded late."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

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
from k3hal.dispatch.probe import probe

selector, cpu = build_selector(sys.argv[1], fallback="warn"), probe("cpu")
chosen = [selector.decide(Call("rms_norm", cpu, "float32", dims={"dim": dim})) for dim in (64, 65)]
loaded = "acme_kernels" in sys.modules
result = chosen[0].function()(1, 2, 1e-5) if chosen[0].backend == "acme" else None
print(json.dumps({
    "chosen": [decision.provider for decision in chosen],
    "why": [line.reasons for line in chosen[1].trace if line.provider == "acme.fused"],
    "loaded_early": loaded, "loaded": "acme_kernels" in sys.modules, "result": result,
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
    _install(wheel, target)
    return target


def _install(wheel: Path, target: Path) -> None:
    """Install as `pip install --target` does for a pure wheel; pip itself need not be in the environment."""
    unpack = f"import zipfile; zipfile.ZipFile({str(wheel)!r}).extractall({str(target)!r})"
    subprocess.run([sys.executable, "-P", "-c", unpack], check=True)


def _python(site: Path | None, code: str, *args: str) -> subprocess.CompletedProcess[str]:
    """Run code with the vendor's package installed, or without."""
    path = [*([str(site)] if site else []), *sys.path]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path)}
    environment.pop("K3HAL_OPS", None)
    command = [sys.executable, "-P", "-c", code, *args]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def _ask(site: Path | None, ops: str = "") -> Any:
    done = _python(site, ASK, ops)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_its_provider_is_chosen_and_the_vendors_library_loads_only_when_it_runs(site: Path) -> None:
    without, with_it = _ask(None), _ask(site)
    assert "acme.fused" not in without["chosen"]
    assert with_it["chosen"] == ["acme.fused", without["chosen"][1]]
    assert with_it["why"] == [["needs dim divisible by 8"]]
    assert (with_it["loaded_early"], with_it["loaded"]) == (False, True)
    assert with_it["result"] == ["fused", 1]


def test_overrides_know_its_names(site: Path) -> None:
    assert _ask(site, "rms_norm=reference")["chosen"] == ["reference", "reference"]
    done = _python(site, ASK, "rms_norm=fused")
    assert "needs dim divisible by 8" in done.stderr, "an override is refused rather than bent"
    assert "did you mean 'acme'" in _python(site, ASK, "rms_norm=acmee").stderr


def test_a_package_that_does_not_import_is_named(site: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken_k3hal-1.0.dist-info"
    broken.mkdir()
    (broken / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-k3hal\nVersion: 1.0\n")
    (broken / "entry_points.txt").write_text("[k3hal.backends]\nbroken = broken_k3hal\n")
    (tmp_path / "broken_k3hal.py").write_text("import no_such_library\n")
    done = _python(tmp_path, "from k3hal.cli import main; raise SystemExit(main(['op', 'list', '--device', 'cpu']))")
    assert done.returncode == 3
    assert "k3hal: error: backend broken (broken_k3hal) cannot be imported: ModuleNotFoundError" in done.stderr
    assert "Traceback" not in done.stderr
