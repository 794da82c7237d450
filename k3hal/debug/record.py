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
from k3hal.debug.state_trail import Rewriters, StateTrail
from k3hal.dispatch.observe import Place
from k3hal.dispatch.select import Decision

logger = logging.getLogger("k3hal.debug.record")

JOINS = ("attn_res_mix", "rms_norm")
"""Outside the layers, these take every sub-layer's result into the residual stream."""
JOINS_PER_LOOK = 4
"""How often the residual stream is looked at: more often costs time, less often keeps more activations in memory."""


class Recorder:
    """The observer behind `K3HAL_DUMP` and `op dump`. `files` are the cases written so far.

    An engine step begins with its `step_metadata` call. Under `nonfinite` and `diverge` only the first call of a step
    that fires is recorded: what comes after it is its consequence. Recording never changes what the model computes; a
    file that cannot be written, or one too many, ends recording with a warning.
    """

    def __init__(self, spec: DumpSpec) -> None:
        self.spec = spec
        self.files: list[str] = []
        self.step = -1
        self._bytes = 0
        self._stopped = False
        self._fired_in = -1
        self._weights = Weights()
        self._last_join: Any = None
        self._joins = 0
        self._rewriters = Rewriters()
        self._pending: list[tuple[Site, Any, Any, Mapping[str, Tensor] | tuple[StateTrail, int], Any]] = []

    def bound(self, place: Place, decision: Decision, fn: Callable[..., Any]) -> Callable[..., Any]:
        op = decision.call.op
        if self.spec.covers(op):
            fn = self._watched(Site(place, decision, self._weights), fn)
        elif self.spec.when == "nonfinite":
            if op == place.op and place.layer is None and op in JOINS:
                fn = self._join(fn)
            fn = self._unrecorded(Site(place, decision, self._weights), fn)
        return self._counted(fn) if op == place.op == "step_metadata" else fn

    def prepared(self, place: Place, decision: Decision, given: Mapping[str, Any], prepared: Mapping[str, Any]) -> None:
        self._weights.remember(place, prepared, given)

    def finish(self) -> None:
        """Look at the last step, which no further step follows."""
        self._look()

    def _counted(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            if self._pending:
                self._look()
            self.step += 1
            return fn(*args, **kwargs)

        return counted

    def _watched(self, site: Site, fn: Callable[..., Any]) -> Callable[..., Any]:
        kinds = {"step": self._at_step, "sample": self._sampled, "nonfinite": self._nonfinite, "diverge": self._diverge}
        return kinds[self.spec.when](site, fn)

    def _at_step(self, site: Site, fn: Callable[..., Any]) -> Callable[..., Any]:
        wanted = self.spec.number

        def watched(*args: Any, **kwargs: Any) -> Any:
            if self.step != wanted:
                return fn(*args, **kwargs)
            return self._recorded(site, fn, args, kwargs)

        return watched

    def _sampled(self, site: Site, fn: Callable[..., Any]) -> Callable[..., Any]:
        every, calls = self.spec.number, 0

        def watched(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls % every:
                return fn(*args, **kwargs)
            return self._recorded(site, fn, args, kwargs)

        return watched

    def _nonfinite(self, site: Site, fn: Callable[..., Any]) -> Callable[..., Any]:
        if site.decision.composed and all(map(self.spec.covers, site.decision.parts)):
            return fn  # its parts are watched, and name the fault more closely
        if site.index_name and site.place.phase == "decode" and not site.decision.composed:
            return self._decoding(site, fn)
        pending, joins = self._pending, _is_join(site)

        def watched(*args: Any, **kwargs: Any) -> Any:
            returned = fn(*args, **kwargs)
            pending.append((site, args, kwargs, {}, returned))
            return returned

        def watched_with_state(*args: Any, **kwargs: Any) -> Any:
            before = site.mutated_rows(args, kwargs)
            self._rewritten(site)
            returned = fn(*args, **kwargs)
            pending.append((site, args, kwargs, before, returned))
            if joins:
                self._joined(returned)
            return returned

        return watched_with_state if site.rewrites else watched

    def _decoding(self, site: Site, fn: Callable[..., Any]) -> Callable[..., Any]:
        trail = StateTrail(site, fn, self._rewriters)
        pending = self._pending

        def watched(*args: Any, **kwargs: Any) -> Any:
            number = trail.add(args, kwargs, self.step)
            returned = fn(*args, **kwargs)
            pending.append((site, args, kwargs, (trail, number), returned))
            return returned

        return watched

    def _unrecorded(self, site: Site, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Not recorded, but what it rewrites may be what a recorded call finds."""
        if not site.rewrites:
            return fn

        def watched(*args: Any, **kwargs: Any) -> Any:
            self._rewritten(site)
            return fn(*args, **kwargs)

        return watched

    def _rewritten(self, site: Site) -> None:
        if site.op == "copy_pages":
            self._rewriters.forget()
        else:
            self._rewriters.claim(site)

    def _join(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """A join of the residual stream that is not itself recorded, but looked at."""

        def watched(*args: Any, **kwargs: Any) -> Any:
            returned = fn(*args, **kwargs)
            self._joined(returned)
            return returned

        return watched

    def _joined(self, returned: Any) -> None:
        self._last_join = returned
        self._joins += 1
        if self._joins % JOINS_PER_LOOK == 0:
            self._look()

    def _look(self) -> None:
        """If the last join is not finite, look through the calls since the last look; forget them in any case.

        What is not finite stays in the residual stream, so that looking there alone misses nothing that reaches the
        answer and costs a fraction of looking at every call.
        """
        if not all_finite(self._last_join) and self._first_of_step():
            for call in self._pending:
                if not all_finite(call[-1]):
                    self._fired(*call)
                    break
        self._pending.clear()
        self._last_join = None

    def _fired(
        self, site: Site, args: Any, kwargs: Any, found: Mapping[str, Tensor] | tuple[StateTrail, int], returned: Any
    ) -> None:
        origin = self._origin()
        if isinstance(found, tuple):
            trail, number = found
            found, repeats = trail.before(number, returned)
            origin["repeats"] = repeats
            if not repeats:
                logger.warning(
                    "%s gave something else when run again: its recorded state may not be what it was", site.op
                )
        named = site.named(args, kwargs)
        self._write(site.case(named, origin, found), site.outputs(returned, named))

    def _diverge(self, site: Site, fn: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            named = site.named(args, kwargs)
            case = site.case(named, self._origin(), {})
            returned = fn(*args, **kwargs)
            outputs = site.outputs(returned, named)
            numbers = judge(site.operator, case.args, outputs, golden(site.operator, case.args))
            if any(n.status == "Fail" for n in numbers) and self._first_of_step():
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
        path = save_case(case, self.spec.folder / name)
        self._bytes += size
        self.files.append(str(path))
        logger.warning("recorded %s (%s) in %s", case.op, self.spec.when, path)


def _is_join(site: Site) -> bool:
    return site.op in JOINS and site.place.op == site.op and site.place.layer is None


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
