"""Whether samples and goldens have the same values here as where a report was made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from k3hal.conform.environment import cpu_kind
from k3hal.conform.source_state import VALUES, same_sources, source_root

_UNKNOWN = "one not known"


def value_differences(report: Mapping[str, Any]) -> list[str]:
    """Why values drawn and computed here may not be those of a report, in words; none where they are the same.

    Values come from torch's generator of random numbers on the CPU, which is another in other versions and with other
    vector instructions, and from the sources of operators, samples and goldens.
    """
    return list(_differences(report))


def _differences(report: Mapping[str, Any]) -> Iterator[str]:
    versions, root = report["versions"], source_root()
    pairs = {
        "torch": (_release(str(versions.get("torch") or _UNKNOWN)), _release(torch.__version__)),
        "CPU": (str(versions.get("cpu") or _UNKNOWN), cpu_kind()),
    }
    yield from (f"{what} {there} there, {here} here" for what, (there, here) in pairs.items() if there != here)
    if root is None or not same_sources(root, report["statement"]["commit"], VALUES):
        yield "the operators' sources are not those of the package's commit"


def _release(version: str) -> str:
    """Without the toolkit it was built with, which draws nothing on the CPU."""
    return version.partition("+")[0]
