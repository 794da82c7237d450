"""The short convolution by torch."""

from __future__ import annotations

from torch import Tensor

from k3hal.backends.ascend._plain import NEEDS, PRIORITY
from k3hal.dispatch import provides
from k3hal.dispatch.transforms import live_rows, zeros_elsewhere
from k3hal.dispatch.transforms.convolution import convolved


@provides("causal_conv1d", name="torch", needs=NEEDS, priority=PRIORITY, graph_safe=True)
def causal_conv1d(
    x: Tensor, weight: Tensor, conv_state: Tensor, slots: Tensor, cu_seqlens: Tensor, has_state: Tensor
) -> Tensor:
    """See the operator."""
    live = live_rows(cu_seqlens, slots, x.shape[0])
    return zeros_elsewhere(live, convolved(x, weight, conv_state, slots, cu_seqlens, has_state))
