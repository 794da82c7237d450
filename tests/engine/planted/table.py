"""The table of planted bugs in docs/cache.md."""

from __future__ import annotations

from . import corruption, drafts, rates, store
from .bug import REPORTS, Bug

BUGS: list[Bug] = sorted((*rates.BUGS, *corruption.BUGS, *drafts.BUGS, *store.BUGS), key=lambda bug: bug.number)


def table() -> list[str]:
    """The lines of the table."""
    lines = ["| report | planted | caught by |", "|---|---|---|"]
    for bug in BUGS:
        repository, number = REPORTS[bug.number].split("#")
        link = f"[{repository.split('/')[1]}#{number}](https://github.com/{repository}/issues/{number})"
        lines.append(f"| {link} | {bug.title} | {bug.kind}: `{bug.check.__name__}` |")
    return lines
