"""Lossless acceptance of drafts, without a word to the host."""

from __future__ import annotations

from torch import Tensor

from k3hal.backends.triton._triton import NEEDS, kernels, runs
from k3hal.dispatch import provides
from k3hal.dispatch.errors import InputError
from k3hal.dispatch.ops.verify_draft import METHODS


@provides("verify_draft", name="blocks", needs=NEEDS, supports=runs, graph_safe=True)
def verify_draft(
    draft_ids: Tensor, draft_probs: Tensor | None, target_probs: Tensor, uniform: Tensor, method: str
) -> tuple[Tensor, Tensor]:
    """See the operator."""
    if method not in METHODS:
        raise InputError(f"verify_draft: method {method!r} is unknown", hint=f"one of {', '.join(METHODS)}")
    return kernels("verify_draft").verify_draft(draft_ids, draft_probs, target_probs, uniform, method)
