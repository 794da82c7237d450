"""What the adapters of torch_npu and vllm-ascend share: which machines, versions and dtypes, and their order."""

from __future__ import annotations

from collections.abc import Sequence

from k3hal.dispatch import Needs

FUSED, LIBRARY = 60, 40
"""Priorities: kernels that do most of an operator, then those that need more around them; torch's own come last."""
A2, A3, A5 = "ascend910b", "ascend910c", "ascend950"
TORCH_NPU = ">=2.10,<2.15"
# Of an older release the schemas are others; its wheels are built for one torch, and one that does not load says so.
VLLM_ASCEND = ">=0.26.0rc0,<0.27"


def torch_npu(*arch: str, dtypes: tuple[str, ...] = ("bfloat16",)) -> Needs:
    """These architectures, by a torch_npu whose schemas are recorded."""
    return Needs(packages={"torch-npu": TORCH_NPU}, dtypes=dtypes, arch=arch)


def vllm_ascend(*arch: str) -> Needs:
    """bf16 on these architectures, by vllm-ascend's own kernels."""
    packages = {"torch-npu": TORCH_NPU, "vllm-ascend": VLLM_ASCEND}
    return Needs(packages=packages, dtypes=("bfloat16",), arch=arch)


LENGTHS = "actual_seq_kvlen"
"""The list of lengths in `npu_fused_infer_attention_score_v2`."""


def at_least_one(lengths: Sequence[int]) -> list[int]:
    """Lengths for a library that has no empty sequences: what one gives of a padding row is thrown away."""
    return [max(1, length) for length in lengths]
