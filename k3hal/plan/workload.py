"""Replicas for a workload: start-up, queueing at the trace's arrivals, and the P95 of the first token."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from k3hal.plan import values
from k3hal.plan.deployment import Deployment
from k3hal.plan.memory import GB, assumptions
from k3hal.plan.refusal import RefusedPlanError
from k3hal.plan.speed import BANDWIDTH_EFFICIENCY, COMPUTE_EFFICIENCY, Speed, speeds
from k3hal.plan.trace import Arrival, percentile

DEFAULT_TARGET = 30.0
MOST_REPLICAS = 4096


@dataclass(frozen=True, slots=True)
class Outcome:
    """A trace served by `replicas`: seconds to the first token, share of the time that prefilling keeps them busy."""

    replicas: int
    ttft_p50: float
    ttft_p95: float
    wait_p95: float
    busy: float


@dataclass(frozen=True, slots=True)
class Sizing:
    """`chosen` is the first of `outcomes` whose P95 is within `target`; the others are one replica fewer and twice."""

    target: float
    requests: int
    rate: float
    slots: int
    start_s: float
    load_s: float
    storage_gb_s: float
    chosen: Outcome
    outcomes: tuple[Outcome, ...]


def size_workload(
    plan: Deployment, arrivals: Sequence[Arrival], target: float = DEFAULT_TARGET, storage_gb_s: float | None = None
) -> Sizing:
    """The fewest replicas of `plan` whose P95 of the time to the first token is within `target` seconds.

    Requests go first come, first served to the replica that can begin soonest; each holds one of the sequences that fit
    the cache at the trace's P95 length, prompts are computed one after another, whole, and no prefix is reused.
    Raises `RefusedPlanError` where requests are too long, or no number of replicas reaches the target.
    """
    prefill, decode = speeds(plan)
    slots = _slots(plan, arrivals)
    alone = percentile([prefill.prefill(arrival.prompt) for arrival in arrivals], 0.95)
    if alone > target:
        raise RefusedPlanError(
            f"no number of replicas reaches a P95 of {target:g} s: an idle one takes {alone:.1f} s for such prompts",
            hint="more GPUs a replica, or a higher --p95",
        )
    seen: dict[int, Outcome] = {}

    def outcome(count: int) -> Outcome:
        if count not in seen:
            seen[count] = simulate(arrivals, count, slots, prefill, decode)
        return seen[count]

    high = 1
    while outcome(high).ttft_p95 > target:
        if high >= MOST_REPLICAS:
            raise RefusedPlanError(f"{high} replicas do not reach a P95 of {target:g} s", hint="raise --p95")
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if outcome(middle).ttft_p95 <= target else (middle, high)
    shown = [outcome(count) for count in sorted({max(high - 1, 1), high, 2 * high})]
    storage = storage_gb_s or assumptions().storage_gb_s
    assert plan.weights is not None
    load = plan.weights.total / GB / (storage * min(group.layout.nodes for group in plan.groups))
    length = max(arrivals[-1].at - arrivals[0].at, 1e-3)
    rate = len(arrivals) / length
    start = load + assumptions().warm_up_s
    return Sizing(target, len(arrivals), rate, slots, start, load, storage, outcome(high), tuple(shown))


def simulate(arrivals: Sequence[Arrival], replicas: int, slots: int, prefill: Speed, decode: Speed) -> Outcome:
    """Serve the trace. A replica is a heap of the times its slots are free, and the time its last prefill ends."""
    free = [(0.0, index) for index in range(replicas)]
    running: list[list[float]] = [[] for _ in range(replicas)]
    heapq.heapify(free)
    waits, firsts, busy, last = [], [], 0.0, 0.0
    for arrival in arrivals:
        ready, index = heapq.heappop(free)
        begin, ends = max(ready, arrival.at), running[index]
        while ends and (ends[0] <= begin or len(ends) >= slots):
            begin = max(begin, heapq.heappop(ends))
        spent = prefill.prefill(arrival.prompt)
        first = begin + spent
        step = decode.step(len(ends) + 1, arrival.prompt)
        heapq.heappush(ends, first + (arrival.output - 1) * step)
        heapq.heappush(free, (first, index))
        waits.append(begin - arrival.at)
        firsts.append(first - arrival.at)
        busy, last = busy + spent, max(last, first)
    span = max(last - arrivals[0].at, 1e-9)
    p50, p95 = percentile(firsts, 0.5), percentile(firsts, 0.95)
    return Outcome(replicas, p50, p95, percentile(waits, 0.95), busy / (span * replicas))


def sizing_document(sizing: Sizing) -> dict[str, Any]:
    return {
        "target_p95_s": sizing.target,
        "requests": sizing.requests,
        "arrivals_per_s": round(sizing.rate, 4),
        "replicas": sizing.chosen.replicas,
        "sequences_per_replica": sizing.slots,
        "start_s": round(sizing.start_s, 1),
        "load_s": round(sizing.load_s, 1),
        "storage_gb_s": sizing.storage_gb_s,
        "outcomes": [
            {
                "replicas": each.replicas,
                "ttft_p50_s": round(each.ttft_p50, 3),
                "ttft_p95_s": round(each.ttft_p95, 3),
                "wait_p95_s": round(each.wait_p95, 3),
                "busy": round(each.busy, 4),
            }
            for each in sizing.outcomes
        ],
        "assumptions": {"compute_efficiency": COMPUTE_EFFICIENCY, "bandwidth_efficiency": BANDWIDTH_EFFICIENCY},
    }


def sizing_text(sizing: Sizing) -> Iterator[str]:
    yield f"workload  {sizing.requests} requests, {sizing.rate:.2f} a second; wanted P95 {sizing.target:g} s"
    yield f"replicas  {sizing.chosen.replicas}, each of {sizing.slots} sequences at the trace's P95 length"
    yield (
        f"start     {sizing.start_s:.0f} s a replica: {sizing.load_s:.0f} s of weights at {sizing.storage_gb_s:g} GB/s "
        "a node, and its warm-up"
    )
    yield f"{'replicas':>9} {'P50 s':>8} {'P95 s':>8} {'wait P95':>9} {'busy':>6}"
    for each in sizing.outcomes:
        yield f"{each.replicas:>9} {each.ttft_p50:>8.2f} {each.ttft_p95:>8.2f} {each.wait_p95:>9.2f} {each.busy:>6.0%}"
    yield (
        f"bounds from datasheets: {COMPUTE_EFFICIENCY:.0%} of the compute, {BANDWIDTH_EFFICIENCY:.0%} of the "
        "bandwidth, no prefix reused"
    )


def _slots(plan: Deployment, arrivals: Sequence[Arrival]) -> int:
    """Sequences of the trace's P95 length that one replica holds at once."""
    length = int(percentile([arrival.prompt + arrival.output for arrival in arrivals], 0.95))
    decode, memory = plan.groups[-1], plan.memory[-1]
    if length > memory.context:
        raise RefusedPlanError(
            f"the trace's P95 request has {length} tokens, a request may have {memory.context}",
            hint=f'raise it with --set "--max-model-len {length}"',
        )
    fits = memory.cost.sequences(length, memory.room)
    if not fits:
        raise RefusedPlanError(f"not one sequence of {length} tokens fits", hint="choose a plan with more memory")
    return min(fits, values.whole(decode, "max-num-seqs", values.DEFAULT_SEQS) * decode.layout.dp)
