"""What of vLLM's options K3HAL's models do not serve: refused by name before weights are read. Knows no vLLM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from k3hal.errors import UnsupportedError


class _Limit(NamedTuple):
    """`refuses` says of a vLLM config whether it asks for what there is not; `option` is what a user set."""

    refuses: Callable[[Any], bool]
    option: str
    hint: str


_LIMITS = (
    _Limit(lambda c: c.parallel_config.pipeline_parallel_size > 1, "--pipeline-parallel-size", "use one stage"),
    _Limit(
        lambda c: c.parallel_config.decode_context_parallel_size > 1,
        "--decode-context-parallel-size",
        "a sequence's cache stays on one rank",
    ),
    _Limit(lambda c: c.parallel_config.enable_expert_parallel, "--enable-expert-parallel", "leave it out"),
    _Limit(lambda c: c.speculative_config is not None, "--speculative-config", "`k3hal serve --draft` has drafts"),
    _Limit(lambda c: c.lora_config is not None, "--enable-lora", "serve merged weights"),
    _Limit(lambda c: c.cache_config.mamba_cache_mode == "all", "--mamba-cache-mode all", "use align"),
    _Limit(
        lambda c: c.cache_config.mamba_ssm_cache_dtype not in ("auto", "float32"),
        "--mamba-ssm-cache-dtype",
        "states are float32",
    ),
    _Limit(
        lambda c: c.cache_config.mamba_cache_dtype != "auto",
        "--mamba-cache-dtype",
        "convolutions keep the model's dtype",
    ),
    _Limit(
        lambda c: c.load_config.load_format not in ("auto", "hf", "safetensors", "dummy"),
        "--load-format",
        "use auto or dummy",
    ),
    _Limit(lambda c: c.model_config.quantization is not None, "--quantization", "weights run as they are packed"),
    _Limit(lambda c: bool(c.model_config.hf_overrides), "--hf-overrides", "edit the folder's config.json"),
    _Limit(lambda c: c.model_config.enable_prompt_embeds, "--enable-prompt-embeds", "send text or token ids"),
    _Limit(lambda c: c.model_config.runner_type != "generate", "--runner pooling", "the model generates"),
    _Limit(lambda c: c.attention_config.backend is not None, "--attention-backend", "`K3HAL_OPS` picks operators"),
    _Limit(lambda c: c.offload_config.uva.cpu_offload_gb > 0, "--cpu-offload-gb", "weights stay on the device"),
    _Limit(
        lambda c: c.offload_config.prefetch.offload_group_size > 0,
        "--offload-group-size",
        "weights stay on the device",
    ),
    _Limit(lambda c: c.parallel_config.use_ubatching, "--enable-dbo", "a step is one batch"),
    _Limit(lambda c: not c.model_config.use_mla, "VLLM_MLA_DISABLE", "attention is latent: leave it unset"),
)


def check(vllm_config: Any) -> None:
    """Raise `UnsupportedError`, one line, for the first option that asks for what there is not."""
    for limit in _LIMITS:
        if limit.refuses(vllm_config):
            raise UnsupportedError(f"k3hal's models do not take {limit.option} in vLLM", hint=limit.hint)
