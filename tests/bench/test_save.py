"""Reports on pages: a table replaces its own former self and nothing else, and the committed page shows the results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from k3hal.bench.save import check_targets, save, tables_of, with_table
from k3hal.bench.tables import Table
from k3hal.errors import InputError, UsageError

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "bench.md"
RESULTS = sorted((ROOT / "docs" / "bench").glob("*.json"))


def _table(name: str, cell: str) -> Table:
    return Table(name, f"Title of {name}", ("a", "b"), [(cell, "1")], ["a note"])


def test_a_table_replaces_its_former_self_only() -> None:
    page = with_table(with_table("# Page\n\ntext\n", _table("one", "old")), _table("two", "kept"))
    changed = with_table(page, _table("one", r"new \1"))
    assert "old" not in changed and r"| new \1 | 1 |" in changed and "| kept | 1 |" in changed
    assert changed.startswith("# Page\n\ntext\n") and changed.count("<!-- end -->") == 2
    assert with_table(changed, _table("one", r"new \1")) == changed


def test_text_is_aligned() -> None:
    lines = _table("one", "long cell").text().splitlines()
    assert lines == ["Title of one", "a          b", "long cell  1", "a note"]


@pytest.mark.parametrize("schema", [None, "k3hal.doctor/1", "k3hal.bench_engine/2"])
def test_a_foreign_report_is_refused(schema: str | None) -> None:
    with pytest.raises(InputError, match="is no benchmark report"):
        tables_of({"schema": schema})


def test_targets_are_checked_before_anything_is_measured(tmp_path: Path) -> None:
    check_targets([tmp_path / "a.json", tmp_path / "b.md"])
    with pytest.raises(UsageError, match=r"not a \.json or \.md"):
        check_targets([tmp_path / "a"])
    with pytest.raises(UsageError, match="is not a directory"):
        check_targets([tmp_path / "none" / "a.json"])


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_the_page_shows_the_committed_results(path: Path, tmp_path: Path) -> None:
    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    copy = tmp_path / "bench.md"
    copy.write_text(PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    save(report, copy)
    assert copy.read_text(encoding="utf-8") == PAGE.read_text(encoding="utf-8")


def test_there_are_committed_results() -> None:
    kinds = {json.loads(path.read_text(encoding="utf-8"))["schema"] for path in RESULTS}
    ours = {f"k3hal.bench_{name}/1" for name in ("engine", "dispatch", "dump", "cache", "serve", "slice")}
    assert kinds == ours | {"k3hal.op_bench/1"}
