"""Ascend: the NPU's device runtime, adapters of torch_npu and vllm-ascend, and torch's own operators behind them."""

from k3hal.dispatch import Backend

BACKEND = Backend(name="ascend", vendors=("ascend",), priority=60, runtime="k3hal.backends.ascend.runtime:NpuRuntime")
