"""The CPU backend: vectorised PyTorch, run everywhere."""

from k3hal.dispatch import Backend

BACKEND = Backend(name="cpu", vendors=("cpu",), priority=50, runtime="k3hal.backends.cpu.runtime:CpuRuntime")
