"""NVIDIA's own: the CUDA device runtime, and adapters of vendor libraries."""

from k3hal.dispatch import Backend

BACKEND = Backend(name="nvidia", vendors=("nvidia",), priority=60, runtime="k3hal.backends._torch_gpu:TorchGpuRuntime")
