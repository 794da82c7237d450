"""What the plugin adds to vLLM's front: tokenizer, rendering and parsers. Called in every process, again and again."""
# vLLM is installed in environments of its own.
# pyright: reportMissingImports=false

from __future__ import annotations

from k3hal.vllm.tokenizer import MODE

PARSERS = ("k3hal", "kimi_k3")
"""Names for `--reasoning-parser` and `--tool-call-parser`."""


def register() -> None:
    """Put K3HAL's tokenizer and renderer behind vLLM's tokenizer mode of Kimi K3, its parsers beside those there are.

    Nothing is loaded before its use. vLLM's own `kimi_k3` parsers stay, and have K3HAL's behind them where it has none.
    """
    from vllm.reasoning import ReasoningParserManager
    from vllm.renderers.registry import RENDERER_REGISTRY
    from vllm.tokenizers.registry import TokenizerRegistry
    from vllm.tool_parsers import ToolParserManager

    # Set, for `register` of either warns of a name that is taken.
    TokenizerRegistry.tokenizers[MODE] = ("k3hal.vllm.tokenizer", "K3Tokenizer")
    RENDERER_REGISTRY.renderers[MODE] = ("k3hal.vllm.renderer", "K3Renderer")
    for manager, kind in ((ReasoningParserManager, "K3ReasoningParser"), (ToolParserManager, "K3ToolParser")):
        missing = [name for name in PARSERS if name not in manager.list_registered()]
        for name in missing:
            manager.register_lazy_module(name, "k3hal.vllm.parsers", kind)
