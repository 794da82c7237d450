"""What a compiled kernel takes of a GPU, read from what the compiler wrote."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_AMD = {
    "registers": "vgpr_count",
    "spilled": "vgpr_spill_count",
    "scratch": "private_segment_fixed_size",
}
_NARROW_DOT = re.compile(r"tt\.dot(?:_scaled)?\b.*?: *tensor<[0-9x]+x(bf16|f16|f8\w+|i8)")
_MATRIX = re.compile(r"\b(v_mfma\w*|wgmma\.mma_async[\w.:]*|mma\.sync[\w.:]*|tcgen05\.mma\.[\w.:]*)")


@dataclass(frozen=True, slots=True)
class Figures:
    """`registers` of a thread, `spilled` of them (AMD's count; NVIDIA's assembler gives bytes of stack alone), bytes of
    `scratch` memory a thread, bytes of `shared` memory a program. `matrix` are the kinds of matrix instructions in it,
    `narrow_dot`: it has a product of operands narrower than fp32, which ought to be one; `scaled_dot`: one of an MX
    format with its scales."""

    registers: int
    spilled: int
    scratch: int
    shared: int
    warps: int
    matrix: tuple[str, ...]
    narrow_dot: bool
    scaled_dot: bool = False


def figures_of(kernel: Any) -> Figures:
    """Of Triton's compiled kernel, which no device need have loaded."""
    asm, metadata = kernel.asm, kernel.metadata
    text = asm.get("ptx") or asm["amdgcn"]
    numbers = _nvidia(asm["cubin"]) if "cubin" in asm else _amd(text)
    found = sorted({_kind(name) for name in _MATRIX.findall(text)})
    narrow = bool(_NARROW_DOT.search(asm["ttir"]))
    return Figures(
        **numbers,
        shared=metadata.shared,
        warps=metadata.num_warps,
        matrix=tuple(found),
        narrow_dot=narrow,
        scaled_dot="tt.dot_scaled" in asm["ttir"],
    )


def _kind(instruction: str) -> str:
    """The instruction without the suffixes that only say how operands lie."""
    return re.sub(r"\.(aligned|sync|row|col|cta_group::\d)\b", "", instruction)


def _amd(text: str) -> dict[str, int]:
    return {name: int(_found(rf"\.{key}:\s+(\d+)", text)) for name, key in _AMD.items()}


def _nvidia(cubin: bytes) -> dict[str, int]:
    """By `cuobjdump`, which comes with Triton."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    stack, local = (int(_found(rf"{name}:(\d+)", said)) for name in ("STACK", "LOCAL"))
    return {"registers": int(_found(r"REG:(\d+)", said)), "spilled": 0, "scratch": stack + local}


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    if match is None:
        raise ValueError(f"the compiler's output has no {pattern}")
    return match[1]
