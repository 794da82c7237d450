"""AMD's own: the ROCm device runtime, projections by its BLAS, and adapters of vendor libraries."""

from k3hal.dispatch import Backend

BACKEND = Backend(name="amd", vendors=("amd",), priority=60, runtime="k3hal.backends._torch_gpu:TorchGpuRuntime")
