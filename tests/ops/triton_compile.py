"""Compiles Triton kernels for GPUs that need not be here, and reads what they use. Not for the interpreter."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TARGETS = {"sm_90": ("cuda", 90, 32), "sm_100": ("cuda", 100, 32), "gfx950": ("hip", "gfx950", 64),
           "gfx942": ("hip", "gfx942", 64)}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Made:
    """`spills` is AMD's number of spilled registers, or NVIDIA's bytes of stack a thread, which is where it spills;
    `shared` bytes of shared memory."""

    text: str
    shared: int
    spills: int


def compile_for(
    kernel: Any, target: str, types: dict[str, str], constants: dict[str, Any], *, warps: int, aligned: bool = True
) -> Made:
    """A kernel whose pointers and integers are multiples of 16 where `aligned`."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = list(kernel.arg_names)
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    whole = [i for i, name in enumerate(names) if signature[name].startswith("*") or name.endswith(("stride", "dim"))]
    attributes = {(i,): [["tt.divisibility", 16]] for i in whole} if aligned else {}
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs=attributes,
    )
    # Said, since its default is about to change and the newer versions warn of that.
    options = {"num_warps": warps, "enable_fp_fusion": True}
    made = triton.compile(source, target=GPUTarget(*TARGETS[target]), options=options)
    text = made.asm.get("ptx") or made.asm["amdgcn"]
    pattern = r"STACK:(\d+)" if "cubin" in made.asm else r"\.vgpr_spill_count:\s+(\d+)"
    found = re.search(pattern, _resources(made.asm["cubin"]) if "cubin" in made.asm else text)
    assert found, "the compiler did not say what it spilled"
    return Made(text, made.metadata.shared, int(found[1]))


def _resources(cubin: bytes) -> str:
    """What cuobjdump, which comes with Triton, says a kernel uses."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
