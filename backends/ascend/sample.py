"""Sampling: greedy rows on the NPU; rows that draw on the host, since the NPU has no fp64."""

from __future__ import annotations

import torch
from torch import Tensor

from k3hal.backends._prefix_sample import drawn
from k3hal.backends.ascend._plain import NEEDS, PRIORITY
from k3hal.dispatch import provides


# The host waits for the logits of rows that draw.
@provides("sample", name="host", needs=NEEDS, priority=PRIORITY)
def sample(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor) -> Tensor:
    """See the operator."""
    out = _likeliest(logits)
    rows = temperature.nonzero()[:, 0]
    if not rows.numel():
        return out
    here = rows.cpu()
    columns = (x.cpu().index_select(0, here) for x in (temperature, top_k, top_p, min_p, uniform))
    ours, every = torch.zeros(rows.numel(), dtype=torch.int64), torch.arange(rows.numel())
    out[rows] = drawn(ours, every, logits.index_select(0, rows).cpu(), *columns).to(out.device)
    return out


def _likeliest(logits: Tensor) -> Tensor:
    """The lowest id of the largest logit: which of equals argmax takes is not promised on every device."""
    ids = torch.arange(logits.shape[1], device=logits.device)
    best = logits == logits.amax(-1, keepdim=True)
    return torch.where(best, ids, logits.shape[1]).amin(-1)
