"""RMSNorm by AITER."""

from __future__ import annotations

from torch import Tensor

from k3hal.backends.amd._aiter import CDNA, LIBRARY, PACKAGE, PRIORITY, switch, usable_as_switched
from k3hal.dispatch import Answer, Call, Needs, provides
from k3hal.dispatch.library import recorded

NEEDS = Needs(packages={PACKAGE: ">=0.1.20,<0.2"}, arch=CDNA)
NORM = recorded(__name__, LIBRARY, "aiter.ops.rmsnorm:rms_norm", ("input", "weight", "epsilon"))


def _supports(call: Call) -> Answer:
    return usable_as_switched(call, (NORM,), switch("_RMSNORM"))


@provides("rms_norm", name="aiter", needs=NEEDS, supports=_supports, priority=PRIORITY, graph_safe=True)
def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """See the operator. The library's own addition is not taken: whether it norms the rounded sum is not said.

    It takes weights of the rows' dtype alone: beside others the rows are widened, and rounded afterwards.
    """
    if residual is not None:
        residual.add_(x)
        x = residual
    rows = x.reshape(-1, x.shape[-1])
    if not rows.shape[0]:
        return rows.new_empty(x.shape)
    if weight.dtype is not x.dtype:
        rows, weight = rows.float(), weight.float()
    return NORM(input=rows, weight=weight, epsilon=eps).to(x.dtype).view(x.shape)
