"""Finds the operator, layer and phase with which a live model begins to differ, by switching providers in it."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from k3hal.debug.case import Case
from k3hal.debug.case_file import save_case
from k3hal.debug.check import check
from k3hal.debug.drive import DECODE, PREFILL, Driver
from k3hal.debug.shrink import shrink
from k3hal.debug.switchboard import Line, Switchboard, tactics_of
from k3hal.debug.target import Target
from k3hal.debug.verdict import Verdict
from k3hal.dispatch.errors import UnsupportedError
from k3hal.dispatch.observe import Place
from k3hal.dispatch.registry import get_operator

logger = logging.getLogger("k3hal.debug.bisect")
AXES = ("provider", "layer", "phase")
TACTIC = "tactic"
"""The axis of its own: not the bad providers as they are, but each of their tactics in turn."""
_NOT_COMPUTED = ("sample", "copy_pages")
"""Operators that the logits of a given sequence do not depend on."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The first divergence. `error` is that of the whole model with all bad providers, `alone` with this one place.

    `position` is the first token whose logits differ, `stages` those in which the fault shows alone; `parts` the parts
    of a composed operator that fail on the case. `verdict` and `case` are of the first call there that fails by itself;
    `case` is None where every call is within tolerance. `suspects` are all operators that diverge alone. `tactic` is
    set on the tactic axis.
    """

    op: str
    layer: int | None
    provider: str
    good: str
    error: float
    alone: float
    position: int
    suspects: tuple[str, ...]
    stages: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    verdict: Verdict | None = None
    case: Case | None = None
    tactic: str = ""

    def to_json(self) -> dict[str, Any]:
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return fields | {
            "verdict": self.verdict.to_json() if self.verdict else None,
            "case": self.case.id if self.case else None,
        }


class Bisection:
    """A model on a switchboard, a sequence to run through it, and what counts as a difference of its logits."""

    def __init__(
        self, board: Switchboard, driver: Driver, token_ids: Sequence[int], decodes: int, threshold: float
    ) -> None:
        self.board, self._driver = board, driver
        self._tokens, self._decodes, self._threshold = token_ids, decodes, threshold
        self._places = [place for place in board.lines if place.op not in _NOT_COMPUTED]
        self._good = self._logits(())

    def find(self, axes: Collection[str] = AXES) -> Finding | None:
        """The first divergence, as far as `axes` go; None if all bad providers together make none.

        On the `tactic` axis each tactic of the bad providers runs in turn, in all places of its operator and alone;
        the first that makes a divergence is found. Raises `UnsupportedError` where no bad provider has tactics.
        """
        if TACTIC in axes:
            return self._find_tactic(axes)
        whole, position = self._difference(self._places)
        if whole <= self._threshold:
            return None
        return self._narrowed(axes, self._suspects(), whole, position)

    def _find_tactic(self, axes: Collection[str]) -> Finding | None:
        tried = 0
        for op in dict.fromkeys(place.op for place in self._places):
            mine = [place for place in self._places if place.op == op]
            names = (name for place in mine for name, _ in tactics_of(self.board.lines[place].site.decision))
            for name in dict.fromkeys(names):
                tried += 1
                with self.board.tactic(mine, name) as places:
                    error, position = self._difference(places)
                    logger.info("only %s bad, tactic %s: logits differ by %.3g", op, name, error)
                    if error > self._threshold:
                        return self._narrowed(axes, [op], error, position)
        if not tried:
            raise UnsupportedError("no provider on the bad side has tactics", hint="`--bad OP=PROVIDER` takes another")
        return None

    def _narrowed(self, axes: Collection[str], suspects: list[str], whole: float, position: int) -> Finding:
        """The layer and the phase of the first divergence of these operators, and a case of it."""
        places = [place for place in self._places if place.op in suspects]
        first = min((self._first(op, axes) for op in suspects), key=self._places.index) if suspects else places[0]
        among = [first] if "layer" in axes else [place for place in places if place.op == first.op]
        alone, at = self._difference(among)
        line = self.board.lines[first]
        layer = first.layer if "layer" in axes else None
        names = (first.op, layer, line.provider, line.good_provider)
        found = Finding(*names, whole, alone, at if alone > self._threshold else position, tuple(suspects))
        if line.tactic:
            found = dataclasses.replace(found, tactic=line.tactic)
        if "phase" in axes:
            found = dataclasses.replace(found, stages=self._stages(among))
        return self._with_case(found, line, first)

    def _suspects(self) -> list[str]:
        """Operators that diverge with everything else good; all of them if it takes several."""
        ops = list(dict.fromkeys(place.op for place in self._places))
        alone = []
        for op in ops:
            error, _ = self._difference([place for place in self._places if place.op == op])
            logger.info("only %s bad: logits differ by %.3g", op, error)
            if error > self._threshold:
                alone.append(op)
        return alone or ops

    def _first(self, op: str, axes: Collection[str]) -> Place:
        """The first place of an operator up to which it must be bad for the logits to differ, by halving."""
        places = sorted((p for p in self._places if p.op == op), key=lambda p: -1 if p.layer is None else p.layer)
        if "layer" not in axes or len(places) == 1:
            return places[0]
        low, high = 0, len(places)
        while high - low > 1:
            middle = (low + high) // 2
            error, _ = self._difference(places[:middle])
            logger.info("%s bad up to layer %s: logits differ by %.3g", op, places[middle - 1].layer, error)
            low, high = (low, middle) if error > self._threshold else (middle, high)
        return places[low]

    def _stages(self, places: Collection[Place]) -> tuple[str, ...]:
        out = []
        for stage in (PREFILL, DECODE)[: 1 + bool(self._decodes)]:
            self.board.only_stage = stage
            if self._difference(places)[0] > self._threshold:
                out.append(stage)
        self.board.only_stage = None
        return tuple(out)

    def _with_case(self, found: Finding, line: Line, place: Place) -> Finding:
        """The finding with the first call of the place that fails by itself, as small as it gets."""
        self.board.capture, self.board.captured = place, []
        self._logits([place])
        self.board.capture = None
        verdict = None
        for case, outputs in self.board.captured:
            verdict = check(case, line.target, repeat=False)
            if verdict.status == "Fail":
                parts = failing_parts(case, line)
                small = shrink(case, lambda c: check(c, line.target, repeat=False).status == "Fail")
                kept = small if small is not case else dataclasses.replace(case, recorded=outputs)
                return dataclasses.replace(found, verdict=verdict, case=kept, parts=parts)
        return dataclasses.replace(found, verdict=verdict)

    def _difference(self, bad: Collection[Place]) -> tuple[float, int]:
        """How far the logits are from the good ones, and the first token where they are too far."""
        return differ(self._logits(bad), self._good, self._threshold)

    def _logits(self, bad: Collection[Place]) -> Tensor:
        self.board.bad = frozenset(bad)

        def stage(name: str) -> None:
            self.board.stage = name

        return self._driver.run(self._tokens, self._decodes, stage)


def differ(logits: Tensor, good: Tensor, threshold: float) -> tuple[float, int]:
    """The largest RMS difference of a token's logits over their RMS, and the first token above the threshold (or -1).

    What is not finite differs infinitely.
    """
    rms = (logits - good).square().mean(-1).sqrt() / good.square().mean(-1).sqrt().clamp_min(1e-30)
    rms = torch.where(logits.isfinite().all(-1), rms, torch.inf)
    above = (rms > threshold).nonzero()
    return float(rms.max()), int(above[0]) if len(above) else -1


def failing_parts(case: Case, line: Line) -> tuple[str, ...]:
    """The parts of a composed operator with which, the others being references, the case fails."""
    lowering = line.site.operator.lowering
    if not line.parts or lowering is None:
        return ()
    out = []
    for name in line.parts:
        parts = {part: get_operator(part).reference for part in line.parts} | {name: line.parts[name]}
        if check(case, Target(case.op, f"composed, {name} bad", lowering(parts)), repeat=False).status == "Fail":
            out.append(name)
    return tuple(out)


def save_finding(found: Finding, folder: Path) -> Path | None:
    """Write the finding's case, if it has one."""
    if found.case is None:
        return None
    layer = "" if found.layer is None else f"-layer{found.layer}"
    return save_case(found.case, folder / f"bisect-{found.op}{layer}.k3case")
