"""docs/vllm.md lists what there is."""

from __future__ import annotations

import re
from pathlib import Path

from k3hal.vllm.collect import _COUNTERS
from k3hal.vllm.compat import SUPPORTED
from k3hal.vllm.contract import load_contracts
from k3hal.vllm.limits import _LIMITS

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "vllm.md").read_text(encoding="utf-8")


def test_refused_options_are_those_of_the_table() -> None:
    assert re.findall(r"^\| `(.+?)` \|", PAGE, re.MULTILINE) == [limit.option for limit in _LIMITS]


def test_metrics_and_versions_are_named() -> None:
    for name, _, _ in _COUNTERS.values():
        assert f"`{name}_total`" in PAGE
    assert f"vLLM {' and '.join(SUPPORTED)}" in PAGE
    counts = {round(len(contract.symbols), -1) for contract in load_contracts()}
    assert counts == {150}, "the page says how many there are"
