"""A report of a backend outside this tree names its package, and the commit of what was judged."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from k3hal.conform.package import read_report
from k3hal.conform.vendor_packages import vendor_packages
from k3hal.conform.verify import verify

from .conftest import edit

MANIFEST = "from k3hal.dispatch import Backend\n\nBACKEND = Backend('{0}', ())\n"


def _git(folder: Path, *words: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Make a package of the name and put it on the path as an installer would; its folder of sources."""

    def make(name: str, *, editable: bool) -> Path:
        source = tmp_path / "sources"
        (source / name).mkdir(parents=True)
        (source / name / "__init__.py").write_text(MANIFEST.format(name))
        info = source / f"{name}-2.5.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.5\n")
        (info / "entry_points.txt").write_text(f"[k3hal.backends]\n{name} = {name}\n")
        (info / "direct_url.json").write_text(json.dumps({"url": source.as_uri(), "dir_info": {"editable": editable}}))
        monkeypatch.syspath_prepend(str(source))
        return source

    return make


def test_an_installed_package_is_named_by_its_version(install: Callable[..., Path]) -> None:
    install("vendor_installed", editable=False)
    row = {"backend": "vendor_installed", "name": "vendor_installed", "version": "2.5", "commit": "", "dirty": False}
    assert vendor_packages({"vendor_installed", "cpu"}) == [row]
    assert vendor_packages({"cpu"}) == []


def test_an_editable_package_is_dirty_until_its_sources_are_committed(install: Callable[..., Path]) -> None:
    source = install("vendor_editable", editable=True)

    def state() -> tuple[str, bool]:
        (one,) = vendor_packages({"vendor_editable"})
        return one["commit"], one["dirty"]

    assert state() == ("", True), "no checkout at all"
    _git(source, "init", "-q")
    (source / ".gitignore").write_text("__pycache__/\n")
    _git(source, "add", ".gitignore")
    _git(source, "commit", "-qm", "nothing of the backend")
    assert state()[1], "not in any commit"
    _git(source, "add", "vendor_editable")
    _git(source, "commit", "-qm", "the backend")
    commit, dirty = state()
    assert len(commit) == 40 and not dirty
    (source / "notes.txt").write_text("beside the backend")
    assert not state()[1]
    (source / "vendor_editable" / "more.py").write_text("")
    assert state() == (commit, True)


def _with_package(**change: Any) -> Callable[[dict[str, Any]], None]:
    row = {"backend": "acme", "name": "k3hal-acme", "version": "0.1.0", "commit": "1" * 40, "dirty": False} | change
    return lambda report: report.update(packages=[row])


def test_verify_rejects_a_dirty_package_and_takes_a_clean_one(package: Path) -> None:
    edit(package, _with_package())
    assert verify(package) == []
    assert f"- backend acme: k3hal-acme 0.1.0, {'1' * 40}\n" in (package / "statement.md").read_text("utf-8")
    edit(package, _with_package(dirty=True))
    assert verify(package) == ["the tree of k3hal-acme was dirty: sources of backend acme that no commit holds"]


def test_a_report_without_packages_is_read(package: Path) -> None:
    edit(package, lambda report: report.pop("packages"))
    assert read_report(package)["packages"] == []
    assert verify(package) == []
