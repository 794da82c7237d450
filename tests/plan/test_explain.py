"""`--explain`: where flags come from, and which provider dispatch would choose on the planned machine."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from k3hal.cli import main

from .conftest import Answer

Plan = Callable[[str], Answer]


@pytest.mark.parametrize(
    ("hardware", "device", "kv"), [("h200", "h200", "bf16"), ("mi355x", "mi355x", "bf16"), ("b300", "b300", "fp8")]
)
def test_operators_are_those_of_dispatch(
    hardware: str, device: str, kv: str, plan: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    strategy = "--strategy multi_node_tp --nodes 2" if hardware == "h200" else ""
    rows = plan(f"--hardware {hardware} {strategy} --explain --json").json["operators"]
    tp = 16 if strategy else 8
    assert main(["op", "plan", "--device", device, "--tp", str(tp), "--kv-cache-dtype", kv, "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)["entries"]
    keys = ("op", "phase", "provider", "level", "reference", "composed")
    assert {tuple(row[key] for key in keys) for row in rows} == {tuple(e[key] for key in keys) for e in entries}


def test_the_text_names_origins_and_what_falls_back(plan: Plan) -> None:
    lines = plan("--hardware mi355x --explain").out.splitlines()
    assert "    --reasoning-parser kimi_k3  <- feature:reasoning over kimi_k3 of hardware:amd" in lines
    assert any(line.startswith("kda_decode ") for line in lines)
    assert "reference" in lines[-1]


def test_both_pools_are_explained(plan: Plan) -> None:
    rows = plan("--hardware gb200 --strategy pd_cluster --explain --json").json["operators"]
    assert {row["op"] for row in rows} >= {"kda_prefill", "kda_decode", "mla_prefill", "mla_decode", "latent_moe"}
