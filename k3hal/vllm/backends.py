"""vLLM's attention backends of the two kinds of layers: they describe caches and steps; the model text computes."""
# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionBackend, AttentionMetadataBuilder, MultipleOf

from k3hal.model.requests import PAGE_TOKENS
from k3hal.vllm.names import KDA_BACKEND, MLA_BACKEND
from k3hal.vllm.step import StepRows, StepSlots, last_columns, slots_of, step_rows


class _Builder(AttentionMetadataBuilder):
    """Asks vLLM for sequences of one new token first."""

    reorder_batch_threshold = 1

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)


class MlaBuilder(_Builder):
    """Where the step's tokens go, from the block table of the MLA layers."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> StepRows:
        step = common_attn_metadata
        return step_rows(
            step.query_start_loc, step.query_start_loc_cpu, step.seq_lens, step.seq_lens_cpu_upper_bound,
            step.block_table_tensor, step.slot_mapping,
        )  # fmt: skip


class KdaBuilder(_Builder):
    """Which slots the step's states are in, from the block table of one group of KDA layers."""

    supports_update_block_table = True

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> StepSlots:
        step, spec = common_attn_metadata, self.kv_cache_spec
        columns = last_columns(step.seq_lens, spec.block_size) if spec.mamba_cache_mode == "align" else None
        return StepSlots(slots_of(step.block_table_tensor, columns), columns)

    def update_block_table(self, metadata: StepSlots, blk_table: Tensor, slot_mapping: Tensor) -> StepSlots:
        """The same step for the next group of layers."""
        return StepSlots(slots_of(blk_table, metadata.columns), metadata.columns)


class _Backend(AttentionBackend):
    """A backend whose layers never call it."""

    @staticmethod
    def get_impl_cls() -> Any:
        raise NotImplementedError("K3HAL's model text attends by itself")


class MlaBackend(_Backend):
    """Latents of `kv_lora_rank + rope` channels, any number of them, in pages of any size."""

    supported_dtypes = [torch.bfloat16, torch.float32]  # noqa: RUF012 - declared so by vLLM
    supported_kv_cache_dtypes = ["auto", "bfloat16", "fp8", "fp8_e4m3"]  # noqa: RUF012

    @staticmethod
    def get_name() -> str:
        return MLA_BACKEND

    @staticmethod
    def get_builder_cls() -> type[MlaBuilder]:
        return MlaBuilder

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Accelerators' kernels know the page size that a dispatch plan is made for; on a CPU every size will do.

        There a block may also not be split: vLLM clears new blocks of a CPU cache by their number in the whole cache.
        """
        return [MultipleOf(1)] if current_platform.is_cpu() else [PAGE_TOKENS]


class KdaBackend(_Backend):
    """States of linear attention."""

    @staticmethod
    def get_name() -> str:
        return KDA_BACKEND

    @staticmethod
    def get_builder_cls() -> type[KdaBuilder]:
        return KdaBuilder

    @classmethod
    def is_ssm(cls) -> bool:
        return True
