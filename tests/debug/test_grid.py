"""Sweeps make the shapes and layouts they say, and what is right passes at every point."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from k3hal.debug.batching import units
from k3hal.debug.case import Case
from k3hal.debug.check import check
from k3hal.debug.grid import parse_grid, sweep
from k3hal.debug.target import Target
from k3hal.dispatch.errors import UsageError
from k3hal.dispatch.registry import get_operator

MakeCase = Callable[..., Case]


def test_grid_text() -> None:
    assert parse_grid("tokens=1,63..65; layout=dense,offset") == {
        "tokens": (1, 63, 64, 65),
        "layout": ("dense", "offset"),
    }


@pytest.mark.parametrize("text", ["rows=1", "tokens", "tokens=", "tokens=a", "tokens=5..2", "batch=0", "layout=odd"])
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
    ],
)
def test_references_pass_every_point(case_of: MakeCase, op: str, name: str, grid: str) -> None:
    axes = parse_grid(grid)
    points = list(sweep(case_of(op, name), axes))
    assert len(points) == len(axes.get("tokens", axes.get("batch", ()))) * len(axes.get("layout", (0,)))
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
