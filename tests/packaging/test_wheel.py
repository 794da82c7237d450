"""The wheel holds exactly the package: every module and data file of the tree, and nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PACKAGE_DIR = SETTINGS["tool"]["setuptools"]["package-dir"]

# Files that belong in the wheel, by suffix, wherever they lie under a package.
SHIPPED = (".py", ".toml", ".json", ".typed", ".cpp", ".cu", ".h", ".html", ".css", ".js", ".svg")


def _tree() -> dict[str, Path]:
    """Path inside the wheel -> path in the tree, of every file that should ship."""
    files = {}
    for package, folder in PACKAGE_DIR.items():
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in SHIPPED or path.name == "py.typed":
                files[str(Path(*package.split("."), path.relative_to(ROOT / folder)))] = path
    return files


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel built from a copy of the tree, so that a build leaves nothing behind in the checkout."""
    work = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, work / name)
    for folder in PACKAGE_DIR.values():
        shutil.copytree(ROOT / folder, work / folder, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-P", "-m", "build", "--wheel", "--no-isolation", "--outdir", "out", "."]
    built = subprocess.run(command, cwd=work, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout[-2000:] + built.stderr[-2000:]
    (path,) = (work / "out").glob("*.whl")
    return zipfile.ZipFile(path)


def test_package_list_matches_the_tree() -> None:
    # A forgotten package works in an editable install and is missing from the wheel.
    in_tree = {str(Path(name).parent).replace("/", ".") for name in _tree() if name.endswith("/__init__.py")}
    assert sorted(SETTINGS["tool"]["setuptools"]["packages"]) == sorted(in_tree)


def test_every_source_folder_is_a_package() -> None:
    folders = {str(Path(name).parent) for name in _tree() if name.endswith(".py")}
    assert [folder for folder in sorted(folders) if f"{folder}/__init__.py" not in _tree()] == []


def test_wheel_holds_the_tree_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    shipped = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert shipped == set(_tree())


def test_wheel_metadata(wheel: zipfile.ZipFile) -> None:
    names = {Path(name).name: name for name in wheel.namelist() if ".dist-info/" in name}
    assert "LICENSE" in names
    assert "k3hal = k3hal.cli:main" in wheel.read(names["entry_points.txt"]).decode()
    metadata = wheel.read(names["METADATA"]).decode()
    version = (ROOT / "k3hal" / "__init__.py").read_text(encoding="utf-8").split('__version__ = "')[1].split('"')[0]
    assert f"\nVersion: {version}\n" in metadata
    assert "\nLicense-Expression: Apache-2.0\n" in metadata


def test_link_farm_mounts_everything() -> None:
    """`ci/typing/k3hal` shows the checkers the package as it is installed."""
    farm = ROOT / "ci" / "typing" / "k3hal"
    wanted = {p.name: p for p in (ROOT / "k3hal").iterdir() if p.suffix in SHIPPED or p.name == "py.typed"}
    wanted |= {p.name: p for p in (ROOT / "k3hal").iterdir() if (p / "__init__.py").exists()}
    wanted |= {package.split(".")[1]: ROOT / folder for package, folder in PACKAGE_DIR.items() if "." in package}
    assert {p.name: p.resolve() for p in farm.iterdir() if p.name != "__pycache__"} == wanted
