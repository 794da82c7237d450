"""The vendors' pipelines: scripts are well-formed, say what they cannot do, and raise levels by a package alone."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from glob import glob
from pathlib import Path

import pytest
import yaml

from k3hal.dispatch.host import cpu_arch

ROOT = Path(__file__).resolve().parents[2]
VENDORS = {"cpu": "-", "nvidia": "/dev/nvidia[0-9]*", "amd": "/dev/kfd", "ascend": "/dev/davinci[0-9]*"}
WORKFLOW = ROOT / ".github" / "workflows" / "conformance.yml"


def _run(vendor: str, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [str(ROOT / "ci" / vendor / "run"), *words]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, check=False)


@pytest.mark.parametrize("script", ["ci/pipeline", "ci/device", *(f"ci/{vendor}/run" for vendor in VENDORS)])
def test_a_script_is_executable_and_parses(script: str) -> None:
    assert os.access(ROOT / script, os.X_OK)
    subprocess.run(["bash", "-n", str(ROOT / script)], check=True)


@pytest.mark.parametrize("vendor", [v for v, node in VENDORS.items() if node != "-" and not glob(node)])
def test_a_vendor_whose_chip_is_not_here_is_refused_before_anything_is_done(vendor: str, tmp_path: Path) -> None:
    said = _run(vendor, OUT=str(tmp_path / "out"), VENV=str(tmp_path / "venv"))
    assert (said.returncode, said.stdout) == (2, "")
    assert said.stderr == f"ci/{vendor}/run: there is no chip of this vendor here: {VENDORS[vendor]} does not exist\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("vendor", sorted(VENDORS))
def test_help_names_every_argument(vendor: str) -> None:
    said = _run(vendor, "--help")
    assert said.returncode == 0
    assert all(word in said.stdout for word in ("--quick", "--bench", "--bump", "Exit codes: 0"))


@pytest.mark.parametrize(
    ("words", "environment", "problem"),
    [
        (["--quik"], {}, "--quik is not understood"),
        (["--quick", "--bump"], {}, "--quick raises no level"),
        ([], {"INSTALL": "no", "VENV": "/nowhere"}, "/nowhere has no Python"),
        ([], {"LIMIT": "an hour"}, "LIMIT is 'an hour', expected seconds"),
        ([], {"TIMEOUT": "-1"}, "TIMEOUT is '-1', expected seconds"),
        ([], {"OUT": "/dev/null/out"}, "OUT: no folder can be written at /dev/null/out"),
        ([], {"WHEELS": "/nowhere"}, "WHEELS: there is no folder /nowhere"),
        ([], {"WHEELS": "/", "PYTHON": "no-such-python"}, "PYTHON: there is no no-such-python"),
    ],
)
def test_a_mistake_is_refused(words: list[str], environment: dict[str, str], problem: str, tmp_path: Path) -> None:
    said = _run("cpu", *words, **{"OUT": str(tmp_path / "out"), **environment})
    assert said.returncode == 4 and f"ci/cpu/run: {problem}" in said.stderr


@pytest.mark.parametrize("vendor", sorted(VENDORS))
def test_an_image_ends_in_the_vendors_script(vendor: str) -> None:
    recipe = (ROOT / "ci" / vendor / "Containerfile").read_text("utf-8")
    assert re.search(r"^FROM \$\{BASE\}$", recipe, re.MULTILINE)
    assert recipe.rstrip().endswith(f'CMD ["ci/{vendor}/run"]')


def test_the_workflow_runs_every_vendors_script_by_hand_and_at_night() -> None:
    workflow = yaml.safe_load(WORKFLOW.read_text("utf-8"))
    on = workflow[True]  # YAML takes the key `on` for a truth value
    assert on["schedule"] and on["workflow_dispatch"]["inputs"]["vendor"]["options"] == list(VENDORS)
    steps = workflow["jobs"]["prove"]["steps"]
    (prove,) = (step for step in steps if step.get("name") == "Prove")
    assert prove["run"] == "ci/$VENDOR/run $ARGUMENTS"
    upload = steps[-1]
    assert upload["uses"].startswith("actions/upload-artifact@") and upload["if"] == "always()"


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_a_level_rises_by_a_verified_package_and_by_nothing_less(tmp_path: Path) -> None:
    """In a clone, of one operator: no level without a commit, then with one a package and a patch that applies."""
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    for path in ("pipeline", "device", "cpu/run"):  # as they are here
        shutil.copy(ROOT / "ci" / path, clone / "ci" / path)
    environment = {
        **os.environ, "INSTALL": "no", "VENV": sys.prefix, "OUT": str(tmp_path / "out"), "CONFORM": "sigmoid_gate",
        "STEPS": "conform", "PLACE": f"{cpu_arch()}/trial", "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }  # fmt: skip
    command, place = [str(clone / "ci" / "cpu" / "run"), "--bump"], clone / "ci/reports/cpu" / cpu_arch() / "trial"
    changed = clone / "dispatch" / "words.py"
    changed.write_text(changed.read_text("utf-8") + "# changed\n", "utf-8")
    said = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert said.returncode == 1 and "rejected: the tree was dirty" in said.stdout
    assert "levels rise by a verified package" in said.stderr and not place.exists()
    subprocess.run(["git", "checkout", "--quiet", "dispatch"], cwd=clone, check=True)
    said = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert said.returncode == 0, said.stderr
    patch = tmp_path / "out" / "levels.patch"
    assert f"ci/reports/cpu/{cpu_arch()}/trial/report.json" in patch.read_text("utf-8")
    subprocess.run(["git", "checkout", "--quiet", "."], cwd=clone, check=True)
    shutil.rmtree(place)
    subprocess.run(["git", "apply", "--check", str(patch)], cwd=clone, check=True)
