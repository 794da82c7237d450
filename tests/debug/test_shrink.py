"""A failing case gets smaller and still fails; `save_smallest` leaves it in a file that fails when loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from k3hal.debug.batching import row_spans, units
from k3hal.debug.case import Case
from k3hal.debug.case_file import load_case
from k3hal.debug.compact import compact
from k3hal.debug.golden import golden
from k3hal.debug.shrink import shrink
from k3hal.dispatch.registry import get_operator

MakeCase = Callable[..., Case]


def test_one_bad_sequence_is_left_and_its_cache_is_cut(case_of: MakeCase) -> None:
    case = case_of("kda_chunk", "around_chunk")
    bad = case.args["slots"][1]
    bad_state = case.args["state"][bad].clone()

    def fails(candidate: Case) -> bool:
        slots, spans = candidate.args["slots"].long(), row_spans(candidate)
        return any(
            torch.equal(candidate.args["state"][slot].nan_to_num(), bad_state.nan_to_num()) and len(span) >= 5
            for slot, span in zip(slots, spans, strict=True)
        )

    small = shrink(case, fails)
    assert fails(small)
    assert (units(small), len(row_spans(small)[0])) == (1, 5)
    assert small.args["state"].shape[0] <= 3
    assert small.nbytes < case.nbytes / 3


def test_shrinking_asks_at_most_its_limit(case_of: MakeCase) -> None:
    asked = []

    def fails(candidate: Case) -> bool:
        asked.append(candidate)
        return True

    shrink(case_of("rms_norm", "plain"), fails, limit=2)
    assert len(asked) <= 3


def test_compact_changes_no_output(case_of: MakeCase) -> None:
    for op, name in (
        ("kda_decode", "null_slots"),
        ("mla_prefill", "page_edges"),
        ("mla_decode", "empty_rows"),
        ("mla_cache_insert", "padding"),
    ):
        case, operator = case_of(op, name), get_operator(op)
        args = dict(case.args)
        if "kv_cache" in args:
            args["kv_cache"] = torch.cat((args["kv_cache"], args["kv_cache"].clone()))
        else:
            args |= {n: torch.cat((args[n], args[n].clone())) for n in ("conv_state", "state")}
        cut = compact(op, args)
        caches = [n for n in ("kv_cache", "state") if n in args]
        assert all(cut[n].shape[0] < args[n].shape[0] for n in caches), op
        out, want = golden(operator, cut), golden(operator, args)
        for name in set(out) - set(operator.mutates):
            assert torch.equal(out[name], want[name]), op


def test_compact_leaves_a_small_cache_alone(case_of: MakeCase) -> None:
    case = case_of("kda_decode", "one")
    assert compact("kda_decode", case.args)["state"] is case.args["state"]


def test_a_shrunk_case_is_a_case(case_of: MakeCase, tmp_path: Path) -> None:
    from k3hal.debug.case_file import save_case

    small = shrink(case_of("kda_decode", "null_slots"), lambda c: units(c) > 1)
    back = load_case(save_case(small, tmp_path / "small.k3case"))
    assert back.args["slots"].tolist() == small.args["slots"].tolist()
