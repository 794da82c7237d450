"""Sweeps make the shapes and layouts they say, and what is right passes at every point."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from k3hal.debug.batching import units
from k3hal.debug.case import Case
from k3hal.debug.check import check
from k3hal.debug.grid import axes_of, check_axes, parse_grid, sweep
from k3hal.debug.target import Target
from k3hal.dispatch.errors import UsageError
from k3hal.dispatch.registry import get_operator

MakeCase = Callable[..., Case]


def test_grid_text() -> None:
    assert parse_grid("tokens=1,63..65; layout=dense,offset") == {
        "tokens": (1, 63, 64, 65),
        "layout": ("dense", "offset"),
    }
    assert parse_grid("context=64+-1,16+-0;tactic=chunk16,all;kv=fp8") == {
        "context": (63, 64, 65, 16),
        "tactic": ("chunk16", "all"),
        "kv": ("fp8",),
    }


@pytest.mark.parametrize(
    "text",
    [
        "rows=1",
        "tokens",
        "tokens=",
        "tokens=a",
        "tokens=5..2",
        "batch=0",
        "layout=odd",
        "kv=fp4",
        "state=lost",
        "mode=",
        "tokens=2+-2",
        "tokens=2+-",
    ],
)
def test_a_malformed_grid_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match="--grid"):
        parse_grid(text)


@pytest.mark.parametrize(
    ("op", "name", "grid"),
    [
        ("kda_chunk", "around_tile", "tokens=1,9;layout=strided"),
        ("kda_decode", "null_slots", "batch=1,7"),
        ("kda_prefill", "null_slot", "batch=4;layout=offset"),
        ("mla_prefill", "page_edges", "tokens=2,8"),
        ("mla_decode", "three", "batch=5;layout=strided,offset"),
        ("mla_cache_insert", "scattered", "batch=2,6"),
        ("moe_experts", "tiny", "tokens=1,6"),
        ("kda_prefill", "null_slot", "heads=1,5;layout=strided"),
        ("kda_chunk", "around_tile", "state=recomputed,restored"),
        ("kda_decode", "null_slots", "state=given,restored;heads=3"),
        ("kda_commit", "eight", "heads=3;state=restored"),
        ("mla_decode", "three", "context=1,4+-1;heads=5;kv=auto,fp8"),
        ("mla_prefill", "page_edges", "context=3..5;kv=fp8"),
        ("mla_cache_insert", "scattered", "kv=fp8"),
    ],
)
def test_references_pass_every_point(case_of: MakeCase, op: str, name: str, grid: str) -> None:
    axes = parse_grid(grid)
    points = list(sweep(case_of(op, name), axes))
    assert len(points) == math.prod(map(len, axes.values()))
    assert len({point.id for point in points}) == len(points)
    for point in points:
        verdict = check(point, Target.reference(get_operator(op)))
        assert verdict.ok, verdict


def test_layouts_differ_in_memory_only(case_of: MakeCase) -> None:
    dense, strided, offset = sweep(case_of("sigmoid_gate", "plain"), parse_grid("layout=dense,strided,offset"))
    x = dense.args["x"]
    assert strided.args["x"].stride(0) > x.shape[1]
    assert offset.args["x"].data_ptr() % 64 == x.element_size()
    assert all(bool((c.args["x"] == x).all()) for c in (strided, offset))


def test_tokens_counts_units(case_of: MakeCase) -> None:
    (point,) = sweep(case_of("rms_norm", "plain"), {"tokens": (70,)})
    assert units(point) == 70


def test_an_axis_that_an_operator_lacks_is_refused_by_name(case_of: MakeCase) -> None:
    message = r"rms_norm has no heads axis \(it has tokens, batch, layout, tactic, mode, start\)"
    with pytest.raises(UsageError, match=message):
        check_axes("rms_norm", {"heads": (3,)})
    with pytest.raises(UsageError, match=message):
        list(sweep(case_of("rms_norm", "plain"), {"heads": (3,)}))
    assert "tokens" not in axes_of("kda_verify")
    assert axes_of("copy_pages") == ("tactic", "mode", "start")


def test_heads_are_told_apart_and_named_in_dims(case_of: MakeCase) -> None:
    (point,) = sweep(case_of("kda_prefill", "three_tokens", "float32"), {"heads": (5,)})
    assert point.dims["heads"] == 5
    q = point.args["qkv"].unflatten(1, (3, 5, -1))[:, 0]
    assert len({tuple(head.flatten().tolist()) for head in q.unbind(1)}) == 5


def test_a_cache_of_another_dtype_lies_where_it_lay(case_of: MakeCase) -> None:
    case = case_of("mla_prefill", "strided")
    (point,) = sweep(case, {"kv": ("fp8",)})
    cache = point.args["kv_cache"]
    assert (cache.dtype, cache.stride()) == (torch.float8_e4m3fn, case.args["kv_cache"].stride())
    with pytest.raises(UsageError, match="kv=bf16 does not go with float32 activations"):
        list(sweep(case, {"kv": ("bf16",)}))


def _reads_the_first_slots(**args: Any) -> torch.Tensor:
    """kda_recurrent that takes the states of slots 1, 2, ... whatever slots it is given."""
    count = int((args["slots"] > 0).sum())
    args["state"][args["slots"][args["slots"] > 0].long()] = args["state"][1 : count + 1].clone()
    return get_operator("kda_recurrent").reference(**args)


def test_a_restored_state_shows_who_reads_where_it_was(case_of: MakeCase) -> None:
    wrong = Target("kda_recurrent", "wrong", _reads_the_first_slots)
    (case,) = sweep(case_of("kda_recurrent", "one"), {"state": ("given",)})
    assert check(case, wrong).ok
    (restored,) = sweep(case, {"state": ("restored",)})
    assert check(restored, wrong).status == "Fail"
