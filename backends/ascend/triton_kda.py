"""KDA's recurrence of a token by a Triton kernel, which triton-ascend compiles."""

from __future__ import annotations

from importlib import import_module

from torch import Tensor

from k3hal.backends.ascend._npu import LIBRARY, TORCH_NPU
from k3hal.dispatch import Answer, Call, Fault, Needs, provides
from k3hal.dispatch.call import No, Yes

NEEDS = Needs(packages={"torch-npu": TORCH_NPU, "triton-ascend": ">=3.2,<3.3"})
HEAD_DIMS = (32, 64, 128)
FAULTS = (
    Fault(
        "https://github.com/vllm-project/vllm-ascend/issues/7359",
        "triton lies over triton-ascend, and no driver is found",
        packages={"triton": "", "triton-ascend": ""},
    ),
)


def _supports(call: Call) -> Answer:
    dim = call.dims.get("head_dim", 128)
    return Yes() if dim in HEAD_DIMS else No(f"needs head_dim {', '.join(map(str, HEAD_DIMS))}, this is {dim}")


@provides(
    "kda_recurrent",
    name="triton_ascend",
    needs=NEEDS,
    supports=_supports,
    priority=LIBRARY,
    graph_safe=True,
    faults=FAULTS,
)
def kda_recurrent(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, slots: Tensor) -> Tensor:
    """See the operator. Each state is read once and written once, where it lies."""
    return import_module("k3hal.backends.ascend.kernels.kda_recurrent").kda_recurrent(q, k, v, g, beta, state, slots)
