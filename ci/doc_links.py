"""Checks that relative links in README.md, CHANGELOG.md and docs/ point at files that are there."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def pages() -> Iterator[Path]:
    """The pages people read."""
    yield from (ROOT / "README.md", ROOT / "CHANGELOG.md")
    yield from sorted((ROOT / "docs").rglob("*.md"))


def broken_links(page: Path) -> Iterator[str]:
    """Link targets of a page, relative to it, that do not exist. Links to other sites are not followed."""
    for target in _LINK.findall(_FENCE.sub("", page.read_text(encoding="utf-8"))):
        path = target.partition("#")[0]
        if path and "://" not in path and not path.startswith("mailto:") and not (page.parent / path).exists():
            yield target


def main() -> int:
    broken = [(page, target) for page in pages() for target in broken_links(page)]
    for page, target in broken:
        print(f"{page.relative_to(ROOT)}: no file at {target}")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
