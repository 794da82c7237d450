"""The evidence level of an operator's provider on an architecture, from the levels packaged with this release."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any, Literal, get_args

Level = Literal["E0", "E1", "E2", "E3", "E4", "E5"]
LEVELS: tuple[Level, ...] = get_args(Level)
"""From nothing proven to performance measured; docs/conformance.md says what each takes."""
DATA = "evidence.json"


def level_of(op: str, provider: str, arch: str) -> Level:
    """The highest level that a committed report proves for (operator, provider id, architecture); E0 without one.

    Read from `evidence.json`, which `ci/support_table.py` writes from the reports in `ci/reports`.
    """
    return _levels().get(op, {}).get(provider, {}).get(arch, "E0")


@cache
def _levels() -> dict[str, Any]:
    return json.loads((files("k3hal.dispatch") / DATA).read_text("utf-8"))["levels"]
