"""Portable Triton kernels for NVIDIA and AMD; on a CPU only under Triton's interpreter, and only chosen by name."""

from k3hal.dispatch import Backend

# Below the CPU backend's priority, so that the interpreter never wins by itself; below the vendors' libraries too.
BACKEND = Backend(name="triton", vendors=("nvidia", "amd", "cpu"), priority=40)
