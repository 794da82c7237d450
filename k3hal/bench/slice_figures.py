"""A layer's time beside its floor, and its operators' times beside theirs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from k3hal.bench.slice_calls import CallRecorder, OpCall
from k3hal.bench.slice_times import CallTime, SliceTimer
from k3hal.debug.ceilings import Ceilings

Call = Callable[[], Any]
Known = dict[tuple[str, str], float]
"""Floors of operators that were timed, by layer kind and label."""
_SAME = 0.1
"""Operators whose floors differ by less, relatively, are the same work."""


class Meter:
    """Times calls of layers and counts what their operators must do at least, under one run's ceilings."""

    def __init__(self, recorder: CallRecorder, timer: SliceTimer, ceilings: Ceilings, *, operators: bool) -> None:
        self._recorder, self.timer, self._ceilings, self._operators = recorder, timer, ceilings, operators

    def decode(self, calls: Sequence[Call]) -> dict[str, Any]:
        """The mean over `calls` of one of them."""
        return self._figure(self.timer.chained(calls), self._record(calls, kept=False), len(calls))

    def operators(self, kind: str, calls: Sequence[Call], known: Known) -> list[dict[str, Any]]:
        """A layer's operators, each by itself, but for those whose work is `known`; extends what is."""
        if not self._operators:
            return []

        def new(label: str, floor: float) -> bool:
            before = known.get((kind, label))
            known.setdefault((kind, label), floor)
            return before is None or abs(floor - before) > _SAME * before

        return self._by_operator(self._record(calls, kept=True), len(calls), self.timer.alone, new)

    def prefill(self, call: Call, *, operators: bool) -> dict[str, Any]:
        """One long call."""
        operators = operators and self._operators
        made = self._record([call], kept=operators)
        out = self._figure(self.timer.launched([call]), made, 1)
        if operators:
            out["operators"] = self._by_operator(made, 1, lambda runs: self.timer.launched(runs).seconds)
        return out

    def _record(self, calls: Sequence[Call], *, kept: bool) -> list[OpCall]:
        with self._recorder.recording(kept=kept) as made:
            for call in calls:
                call()
        return made

    def _floor(self, call: OpCall) -> float:
        return self._ceilings.seconds(call.cost.flops, call.cost.bytes)

    def _figure(self, time: CallTime, made: Sequence[OpCall], calls: int) -> dict[str, Any]:
        made = [call for call in made if not call.part_of]
        floor = sum(map(self._floor, made)) / calls
        return {
            "seconds": time.seconds,
            "floor": floor,
            "ratio": time.seconds / floor,
            "launched": time.launched,
            "bytes": sum(call.cost.bytes for call in made) / calls,
            "flops": sum(call.cost.flops for call in made) / calls,
        }

    def _by_operator(
        self,
        made: Sequence[OpCall],
        calls: int,
        alone: Callable[[Sequence[Call]], float],
        wanted: Callable[[str, float], bool] = lambda label, floor: True,
    ) -> list[dict[str, Any]]:
        """Seconds and floors in one layer of each operator, with each shape of weights: all its calls there."""
        groups: dict[str, list[OpCall]] = {}
        for call in made:
            groups.setdefault(call.label, []).append(call)
        out = []
        for label, group in groups.items():
            share = len(group) / calls
            floor = sum(map(self._floor, group)) / calls
            if wanted(label, floor):
                seconds = alone([call.run for call in group if call.run]) * share
                facts = {"operator": label, "part_of": group[0].part_of, "provider": group[0].provider, "calls": share}
                out.append({**facts, "seconds": seconds, "floor": floor})
        return out
