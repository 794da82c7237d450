"""Records live operator calls as cases when a condition holds."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from k3hal.debug.capture import Site, Weights
from k3hal.debug.case import Case
from k3hal.debug.case_file import save_case
from k3hal.debug.dump_spec import DumpSpec
from k3hal.debug.golden import golden
from k3hal.debug.judge import judge
from k3hal.debug.memory import same_bytes
from k3hal.debug.step_trail import StepTrail
from k3hal.dispatch.observe import Place, Step, is_repetition
from k3hal.dispatch.select import Decision
from k3hal.errors import InputError

logger = logging.getLogger("k3hal.debug.record")


class Recorder:
    """The observer behind `K3HAL_DUMP` and `op dump`. `files` are the cases written so far.

    An engine step begins with its `step_metadata` call. Under `nonfinite` and `diverge` only the first call of a step
    that fires is recorded: what comes after it is its consequence. Recording never changes what the model computes; a
    file that cannot be written, or one too many, ends it with a warning.

    Under `nonfinite` nothing is kept of a call: what is not finite stays in the residual stream, so that looking at a
    step's result misses nothing that reaches the answer. A step that fires is repeated from the caches it found
    (`step_trail`), and its calls are looked at then. Where nobody tells of steps (`steps` False), `step` is counted by
    whoever runs them, and every call is kept and looked at as it is made.
    """

    def __init__(self, spec: DumpSpec, *, steps: bool = True) -> None:
        self.spec = spec
        self.files: list[str] = []
        self.step = -1
        self._told_of_steps = steps
        self._bytes = 0
        self._stopped = False
        self._fired_in = -1
        self._weights = Weights()
        self._trail = StepTrail() if steps and spec.when == "nonfinite" else None
        self._found: list[tuple[Case, Mapping[str, Tensor]]] | None = None
        """What the repetition under way has found; None while there is none."""

    def bound(self, place: Place, decision: Decision, fn: Callable[..., Any]) -> Callable[..., Any]:
        op = decision.call.op
        if self.spec.covers(op):
            fn = self._watched(Site(place, decision, self._weights), fn)
        return self._counted(fn) if self._told_of_steps and op == place.op == "step_metadata" else fn

    def prepared(self, place: Place, decision: Decision, given: Mapping[str, Any], prepared: Mapping[str, Any]) -> None:
        self._weights.remember(place, prepared, given)

    def stepping(self, step: Step) -> None:
        if self._trail is not None and not self._stopped:
            self._trail.add(step)

    def stepped(self, step: Step, hidden: Tensor) -> None:
        if self._trail is not None and not self._stopped:
            self._trail.done()
            if not all_finite(hidden):
                self._repeat(self._trail, step, hidden)

    def _counted(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.step += 1
            return fn(*args, **kwargs)

        return counted

    def _watched(self, site: Site, fn: Callable[..., Any]) -> Callable[..., Any]:
        kinds = {"step": self._at_step, "sample": self._sampled, "nonfinite": self._nonfinite, "diverge": self._diverge}
        return kinds[self.spec.when](site, fn)

    def _at_step(self, site: Site, fn: Callable[..., Any]) -> Callable[..., Any]:
        wanted = self.spec.number

        def watched(*args: Any, **kwargs: Any) -> Any:
            if self.step != wanted or is_repetition():
                return fn(*args, **kwargs)
            return self._recorded(site, fn, args, kwargs)

        return watched

    def _sampled(self, site: Site, fn: Callable[..., Any]) -> Callable[..., Any]:
        every, calls = self.spec.number, 0

        def watched(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            if is_repetition():
                return fn(*args, **kwargs)
            calls += 1
            if calls % every:
                return fn(*args, **kwargs)
            return self._recorded(site, fn, args, kwargs)

        return watched

    def _nonfinite(self, site: Site, fn: Callable[..., Any]) -> Callable[..., Any]:
        if site.decision.composed and all(map(self.spec.covers, site.decision.parts)):
            return fn  # its parts are watched, and name the fault more closely
        if self._trail is None:
            return self._kept(site, fn, lambda _, outputs: not all_finite(tuple(outputs.values())))

        def watched(*args: Any, **kwargs: Any) -> Any:
            found = self._found
            if found is None or found:
                return fn(*args, **kwargs)
            before = site.mutated_rows(args, kwargs)
            returned = fn(*args, **kwargs)
            if not found and not all_finite(returned):
                named = site.named(args, kwargs)
                found.append((site.case(named, self._origin(), before), site.outputs(returned, named)))
            return returned

        return watched

    def _repeat(self, trail: StepTrail, step: Step, hidden: Tensor) -> None:
        """Run the step, which has just given `hidden`, again; record the first call of it that is not finite."""
        found: list[tuple[Case, Mapping[str, Tensor]]] = []
        try:
            with trail.rewound() as live:
                self._found = found
                again = step.run()
                repeats = same_bytes(again, hidden) and live.hold_still()
        except Exception:
            logger.exception("step %d is not finite, but failed when run again: nothing is recorded of it", self.step)
            return
        finally:
            self._found = None
        if found:
            self._fired(*found[0], repeats)
        elif all_finite(again):
            logger.warning(
                "step %d is not finite, but was when run again: when=step:%d records it as it is", self.step, self.step
            )
        else:
            logger.warning("step %d is not finite, but no call of %s gave that", self.step, self.spec.ops)

    def _fired(self, case: Case, outputs: Mapping[str, Tensor], repeats: bool) -> None:
        if not repeats:
            logger.warning(
                "step %d gave something else when run again: the recorded %s is of that run", self.step, case.op
            )
        self._write(dataclasses.replace(case, origin={**case.origin, "repeats": repeats}), outputs)

    def _diverge(self, site: Site, fn: Callable[..., Any]) -> Callable[..., Any]:
        def fails(case: Case, outputs: Mapping[str, Any]) -> bool:
            numbers = judge(site.operator, case.args, outputs, golden(site.operator, case.args))
            return any(n.status == "Fail" for n in numbers)

        return self._kept(site, fn, fails)

    def _kept(
        self, site: Site, fn: Callable[..., Any], fires: Callable[[Case, Mapping[str, Any]], bool]
    ) -> Callable[..., Any]:
        """Keeps every call until it is known whether it fires; of a step the first that does is recorded."""

        def watched(*args: Any, **kwargs: Any) -> Any:
            if is_repetition():
                return fn(*args, **kwargs)
            named = site.named(args, kwargs)
            case = site.case(named, self._origin(), {})
            returned = fn(*args, **kwargs)
            outputs = site.outputs(returned, named)
            if fires(case, outputs) and self._first_of_step():
                self._write(case, outputs)
            return returned

        return watched

    def _recorded(self, site: Site, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        named = site.named(args, kwargs)
        case = site.case(named, self._origin(), {})
        returned = fn(*args, **kwargs)
        self._write(case, site.outputs(returned, named))
        return returned

    def _origin(self) -> dict[str, Any]:
        return {"step": self.step, "condition": self.spec.when}

    def _first_of_step(self) -> bool:
        first, self._fired_in = self._fired_in != self.step, self.step
        return first

    def _write(self, case: Case, outputs: Mapping[str, Tensor]) -> None:
        if self._stopped:
            return
        case = dataclasses.replace(case, recorded=outputs)
        size = case.nbytes + sum(value.nbytes for value in outputs.values())
        if self._bytes + size > self.spec.max_bytes:
            self._stopped = True
            logger.warning("recording stops: the next case would exceed %.3g GB", self.spec.max_bytes / 1e9)
            return
        name = f"{len(self.files):05d}-{case.op}-{case.name}-step{self.step}.k3case"
        try:
            path = save_case(case, self.spec.folder / name)
        except InputError as error:
            self._stopped = True
            logger.warning("recording stops: %s", error)
            return
        self._bytes += size
        self.files.append(str(path))
        logger.warning("recorded %s (%s) in %s", case.op, self.spec.when, path)


def all_finite(returned: Any) -> bool:
    """Whether all floating-point tensors a call returned are finite.

    A sum is not finite if an element is not; only then, since a sum can also overflow, is every element looked at.
    """
    for value in returned if isinstance(returned, tuple) else (returned,):
        if not isinstance(value, Tensor) or not value.dtype.is_floating_point or not value.numel():
            continue
        if not math.isfinite(value.sum()) and not bool(value.isfinite().all()):
            return False
    return True
