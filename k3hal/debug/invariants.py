"""Properties that hold between calls of an operator, whatever its values: no golden is needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from k3hal.debug.batching import BATCHING, row_spans, select, take, unit_outputs, units
from k3hal.debug.case import Case
from k3hal.debug.check import describe
from k3hal.debug.decode_invariant import decode_equals_prefill
from k3hal.debug.execute import Calls
from k3hal.debug.far import far_offsets
from k3hal.debug.judge import judge
from k3hal.debug.target import Target
from k3hal.debug.verdict import Status, TensorNumbers, Verdict, worst
from k3hal.dispatch.operator import Operator
from k3hal.dispatch.registry import get_operator

Outputs = Mapping[str, Tensor]
Pair = tuple[Outputs, Outputs]
"""What came out one way, and what must equal it within the outputs' tolerance."""

_PADDING_UNITS = 2
_STATES = ("conv_state", "state")
_ALIASES = {
    "chunk_split": "split",
    "batch_composition": "batch",
    "padding_rows": "pad",
    "decode_equals_prefill": "decode",
}


def invariants_of(operator: Operator) -> tuple[str, ...]:
    """The names in `INVARIANTS` that an operator's contract promises."""
    names = [_ALIASES.get(name, name) for name in operator.invariants]
    return tuple(name for name in INVARIANTS if name in names)


def check_invariant(name: str, case: Case, target: Target) -> Verdict | None:
    """Whether an invariant holds for a case. None where the case gives it nothing to try.

    What its calls wrote that they may not, and the global state they changed, fail it as they fail a sample.
    """
    calls = Calls(get_operator(case.op), target)
    tensors: list[TensorNumbers] = []
    try:
        pairs = INVARIANTS[name](calls, case)
    except Exception as error:  # noqa: BLE001 - what a provider raises is its result
        pairs = []
        calls.note([describe(error)])
    if not pairs and not calls.problems:
        return None
    for actual, expected in pairs:
        tensors += judge(calls.operator, case.args, actual, expected)
    statuses: list[Status] = [t.status for t in tensors]
    if calls.problems:
        statuses.append("Fail")
    names, problems = (case.op, target.id, f"{case.id} [{name}]"), tuple(calls.problems)
    return Verdict(*names, worst(statuses), problems, tuple(tensors), extra={"invariant": name})


def _batch(calls: Calls, case: Case) -> list[Pair]:
    """The whole batch equals its units reversed, and its halves alone."""
    count = units(case)
    if count < 2:
        return []
    whole, half = calls(case.args), count // 2
    pairs = []
    for keep in (range(count - 1, -1, -1), range(half), range(half, count)):
        part = select(case, keep)
        alone = calls(part.args)
        pairs.append((unit_outputs(part, alone, range(len(keep))), unit_outputs(case, whole, keep)))
    return pairs


def _pad(calls: Calls, case: Case) -> list[Pair]:
    """Padding units change nothing of the others, and are zero themselves."""
    padded, count = padding_added(case, _PADDING_UNITS), units(case)
    if padded is None:
        return []
    whole, more = calls(case.args), calls(padded.args)
    if BATCHING[case.op].spans == "cu_seqlens":
        used = row_spans(case)[-1].stop if count else 0
        names = [name for name in BATCHING[case.op].row_outputs if name in more]
        mine: Pair = ({n: more[n][:used] for n in names}, {n: whole[n][:used] for n in names})
        zeros = {n: more[n][used:] for n in names}
    else:
        extra = range(count, count + _PADDING_UNITS)
        mine = (unit_outputs(padded, more, range(count)), unit_outputs(case, whole, range(count)))
        padding = unit_outputs(padded, more, extra)
        zeros = {name: padding[name] for name in _ZERO_PADDING.get(case.op, ())}
    caches = {name: more[name] for name in calls.operator.mutates if name in more}
    pairs: list[Pair] = [mine, (caches, {name: whole[name] for name in caches})]
    return [*pairs, (zeros, {name: torch.zeros_like(value) for name, value in zeros.items()})]


_ZERO_PADDING: Mapping[str, tuple[str, ...]] = {
    "kda_verify": ("out", "u", "k"),
    **dict.fromkeys(("kda_decode", "kda_recurrent", "mla_decode"), ("out",)),
    **dict.fromkeys(("moe_experts", "moe_experts_a8w4", "moe_experts_int4", "moe_experts_mxfp4"), ("out",)),
}
"""The outputs that are zero in padding units, of operators that promise so."""
_PADDING_VALUES: Mapping[str, Mapping[str, float]] = {
    "slots": {"slots": 0, "accepted": 0},
    "seq_lens": {"seq_lens": 0, "page_table": 1 << 30},
    "rows": {"rows": -1},
    "ids": {"ids": -1},
}
"""What makes a unit a padding unit, by the argument that says so; its other arguments are poisoned."""


def padding_added(case: Case, count: int) -> Case | None:
    """The case with padding at its end, poisoned; None where the operator knows no padding."""
    batching = BATCHING.get(case.op)
    if batching is None:
        return None
    if batching.spans == "cu_seqlens":
        return case.with_args("padded", **{n: _extended(case.args[n], count, None) for n in batching.rows})
    marker = next((name for name in _PADDING_VALUES if name in case.args), None)
    if marker is None or case.op == "embed" or not units(case):
        return None
    changes = {}
    width = case.args["width"] if batching.spans == "width" else 1
    for name in (*batching.rows, *batching.sequences):
        rows = count * width if name in batching.rows else count
        changes[name] = _extended(case.args[name], rows, _PADDING_VALUES[marker].get(name))
    return case.with_args("padded", **changes)


def _extended(value: Tensor, count: int, filled: float | None) -> Tensor:
    """`count` more rows: of one value, or poisoned."""
    more = torch.empty(count, *value.shape[1:], dtype=value.dtype)
    if filled is None:
        more.view(torch.uint8).fill_(0xFF)
    else:
        more.fill_(filled)
    return torch.cat((value, more))


def _split(calls: Calls, case: Case) -> list[Pair]:
    return _in_two_steps(calls, case, move=False)


def _restore(calls: Calls, case: Case) -> list[Pair]:
    return _in_two_steps(calls, case, move=True)


def _in_two_steps(calls: Calls, case: Case, *, move: bool) -> list[Pair]:
    """All at once equals the first halves of all sequences, then the rest.

    With `move` the states are copied to other slots in between, as a snapshot's restore does, and the first slots are
    poisoned.
    """
    batching = BATCHING.get(case.op)
    if batching is None or batching.spans != "cu_seqlens":
        return []
    spans = row_spans(case)
    whole_units = [n for n, span in enumerate(spans) if len(span) > 1 and _has_slot(case, n)]
    if not whole_units:
        return []
    case = select(case, whole_units)
    spans = row_spans(case)
    halves = [len(span) // 2 for span in spans]
    whole = calls(case.args)
    first = _piece(case, [span[:half] for span, half in zip(spans, halves, strict=True)], "first")
    early = calls(first.args)
    second = _piece(case, [span[half:] for span, half in zip(spans, halves, strict=True)], "second")
    changes = {name: early[name] for name in calls.operator.mutates}
    if "has_state" in case.args:
        changes["has_state"] = torch.ones_like(case.args["has_state"])
    else:
        changes["context_lens"] = case.args["context_lens"] + torch.tensor(halves, dtype=torch.int32)
    slots = case.args.get("slots")
    if move and slots is not None:
        changes |= _moved({name: early[name] for name in calls.operator.mutates}, slots)
    late = calls(second.with_args("continued", **changes).args)
    rows = [row for span, half in zip(spans, halves, strict=True) for row in span[half:]]
    pairs: list[Pair] = [
        (
            {n: late[n][: len(rows)] for n in batching.row_outputs},
            {n: take(whole[n], rows) for n in batching.row_outputs},
        )
    ]
    if slots is not None:
        now = (changes["slots"] if move else slots).long()
        ends = {name: late[name][now] for name in calls.operator.mutates}
        pairs.append((ends, {name: whole[name][slots.long()] for name in calls.operator.mutates}))
    return pairs


def _has_slot(case: Case, unit: int) -> bool:
    return "slots" not in case.args or int(case.args["slots"][unit]) != 0


def _piece(case: Case, rows: Sequence[range], name: str) -> Case:
    """Some rows of every sequence."""
    flat = [row for span in rows for row in span]
    bounds = torch.tensor([0, *(len(span) for span in rows)]).cumsum(0).to(case.args["cu_seqlens"].dtype)
    changes = {n: take(case.args[n], flat) for n in BATCHING[case.op].rows}
    return case.with_args(name, **changes, cu_seqlens=bounds)


def _moved(states: Mapping[str, Tensor], slots: Tensor) -> dict[str, Tensor]:
    """The states in new slots after all others; where they were is poison."""
    out: dict[str, Tensor] = {}
    for name, value in states.items():
        moved = torch.cat((value, value[slots.long()]))
        moved[slots.long()] = torch.nan
        out[name] = moved
    count = next(iter(states.values())).shape[0]
    return out | {"slots": torch.arange(count, count + len(slots), dtype=slots.dtype)}


def _replay(calls: Calls, case: Case) -> list[Pair]:
    """A graph captured from the call and replayed, cold and again, equals the eager call."""
    from k3hal.debug.graph import replayed

    runs = replayed(calls, case)
    if not runs:
        return []
    eager = calls(case.args)
    return [(run, eager) for run in runs]


INVARIANTS: Mapping[str, Callable[[Calls, Case], list[Pair]]] = {
    "split": _split,
    "restore": _restore,
    "batch": _batch,
    "pad": _pad,
    "decode": decode_equals_prefill,
    "replay": _replay,
    "far": far_offsets,
}
