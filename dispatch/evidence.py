"""The evidence level of an operator's provider on an architecture."""

from __future__ import annotations

from typing import Literal

Level = Literal["E0", "E1", "E2", "E3", "E4", "E5"]


def level_of(op: str, provider: str, arch: str) -> Level:
    """The highest level that a committed report proves for (operator, provider id, architecture).

    No report is committed and nothing is read: every answer is E0, "declared".
    """
    return "E0"
