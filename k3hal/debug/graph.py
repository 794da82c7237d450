"""Captures a call in a device graph and replays it."""

from __future__ import annotations

import torch
from torch import Tensor

from k3hal.debug.case import Case
from k3hal.debug.contain import contained
from k3hal.debug.execute import Calls
from k3hal.debug.golden import named_outputs
from k3hal.debug.memory import GuardedCopy, PoisonedEmpty
from k3hal.dispatch.host_lengths import telling
from k3hal.dispatch.probe import probe
from k3hal.dispatch.runtime import runtime_for

REPLAYS = 2


def replayed(calls: Calls, case: Case) -> list[dict[str, Tensor]]:
    """Outputs of each replay, with mutated arguments put back before it; nothing where the device has no graphs, or the
    target does not say that it may be captured.

    Memory that the call takes uninitialised is poisoned by the graph itself, and so in every replay.
    """
    operator, target = calls.operator, calls.target
    runtime = runtime_for(probe(target.device))
    if not (runtime.supports_graphs and target.graph_safe):
        return []
    copy = GuardedCopy(case.args, target.device)
    call = dict(copy.args)
    if target.prepare:
        call |= target.prepare(**{name: call[name] for name in operator.weights})
    before = {name: call[name].clone() for name in operator.mutates if call[name] is not None}
    given: list[object] = []
    lengths = case.args.get("seq_lens")
    with torch.inference_mode(), telling([] if lengths is None else lengths.tolist()):
        with contained(copy.device) as changes:
            target.fn(**call)
            runtime.synchronize()
        calls.note(changes)
        with contained(copy.device) as changes, PoisonedEmpty():
            graph = runtime.capture(lambda: given.append(target.fn(**call)))
        calls.note(changes)
        out = []
        for _ in range(REPLAYS):
            for name, value in before.items():
                call[name].copy_(value)
            graph.replay()
            runtime.synchronize()
            outputs = named_outputs(operator, given[-1], call)
            out.append({name: value.to("cpu", copy=True) for name, value in outputs.items()})
    return out
