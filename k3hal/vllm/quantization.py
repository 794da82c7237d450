"""Keeps vLLM's quantisation away from packed weights, which K3HAL's operators take as they are."""
# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

from vllm.model_executor.models.config import VerifyAndUpdateConfig


class UnquantizedToVllm(VerifyAndUpdateConfig):
    """vLLM's hook for an architecture's config: called before it looks for a method for the quantised weights."""

    @classmethod
    def verify_and_update_model_config(cls, model_config: Any) -> None:
        """vLLM would pick layers, dtypes and kernels of its own for the format, none of which the model has."""
        for config in (model_config.hf_config, model_config.hf_text_config, model_config.model_arch_config):
            if getattr(config, "quantization_config", None) is not None:
                config.quantization_config = None
