"""The public reports of caches gone wrong, each planted into this engine and caught by its named check."""

from __future__ import annotations

from pathlib import Path

import pytest

from .planted.bug import Bug
from .planted.table import BUGS, table

PAGE = Path(__file__).parents[2] / "docs" / "cache.md"


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: f"{bug.number:02}-{bug.check.__name__}")
def test_the_check_fails_with_the_bug_and_only_then(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    bug.check()
    with monkeypatch.context() as patch:
        bug.plant(patch)
        try:
            bug.check()
        except Exception as caught:  # noqa: BLE001
            print(f"{bug.number:2}  {bug.kind:20} {bug.check.__name__:45} {type(caught).__name__}: {bug.title}")
        else:
            pytest.fail(f"planted bug {bug.number} is not caught: {bug.title}")
    bug.check()


def test_every_report_is_planted() -> None:
    assert [bug.number for bug in BUGS] == list(range(1, 31))


def test_the_page_lists_them() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    start = lines.index("| report | planted | caught by |")
    assert lines[start : start + 2 + len(BUGS)] == table(), "docs/cache.md: put in the lines of planted/table.py"
