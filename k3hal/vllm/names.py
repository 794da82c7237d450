"""Names the plugin goes by in vLLM."""

from __future__ import annotations

SWITCH = "K3HAL_VLLM"
"""The variable that turns the plugin off."""

MODELS = {
    "KimiK3ForConditionalGeneration": "k3hal.vllm.model:KimiK3ForConditionalGeneration",
    "KimiLinearForCausalLM": "k3hal.vllm.model:KimiLinearForCausalLM",
}
"""Architectures, as a checkpoint's config names them, that K3HAL's model text runs."""

KDA_BACKEND = "K3HAL_KDA"
MLA_BACKEND = "K3HAL_MLA"
BACKENDS = {
    KDA_BACKEND: "k3hal.vllm.backends.KdaBackend",
    MLA_BACKEND: "k3hal.vllm.backends.MlaBackend",
}
"""Attention backends by the names vLLM knows them under."""
