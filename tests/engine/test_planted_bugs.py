"""The public reports of caches gone wrong, each planted into this engine and caught by its named check."""

from __future__ import annotations

import pytest

from .planted import corruption, drafts, rates
from .planted.bug import Bug

BUGS = sorted((*rates.BUGS, *corruption.BUGS, *drafts.BUGS), key=lambda bug: bug.number)


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


def test_every_report_of_what_there_is_is_planted() -> None:
    about_an_external_store = {10, 11, 12}
    assert [bug.number for bug in BUGS] == sorted({*range(1, 31)} - about_an_external_store)
