"""Chooses the quick subset of an operator's samples: few, and something of every class, dtype and phase."""

from __future__ import annotations

from collections.abc import Sequence

from k3hal.dispatch.operator import Sample

CLASSES_OF_QUICK = ("tiny", "edge", "adversarial")
MUST = "must"


def quick_samples(samples: Sequence[Sample]) -> list[Sample]:
    """At least one sample of every (class, dtype, phase) among tiny, edge and adversarial ones, in the given order.

    A greedy cover over (class, dtype, phase) and the values of every static dim, so that each path a provider's
    `supports` distinguishes is taken, and the samples tagged `must`; the choice depends on the samples' declarations
    only.
    """
    eligible = [s for s in samples if not s.tags & {"k3", "device"}] or list(samples)
    missing = {fact for sample in eligible for fact in _facts(sample)}
    chosen = [sample for sample in eligible if MUST in sample.tags]
    missing -= {fact for sample in chosen for fact in _facts(sample)}
    while missing:
        best = max(eligible, key=lambda sample: len(_facts(sample) & missing))
        chosen.append(best)
        missing -= _facts(best)
    return [sample for sample in samples if any(sample is one for one in chosen)]


def _facts(sample: Sample) -> set[tuple[object, ...]]:
    classes = [tag for tag in CLASSES_OF_QUICK if tag in sample.tags] or ["tiny"]
    out: set[tuple[object, ...]] = {(tag, sample.dtype, sample.phase) for tag in classes}
    return out | {("dim", name, str(value)) for name, value in sample.dims.items()}
