"""What the plugin adds to vLLM's front: tokenizer and rendering. Called in every process, as often as vLLM likes."""
# vLLM is installed in environments of its own.
# pyright: reportMissingImports=false

from __future__ import annotations

from k3hal.vllm.tokenizer import MODE


def register() -> None:
    """Put K3HAL's tokenizer and renderer behind vLLM's tokenizer mode of Kimi K3; neither is loaded before its use."""
    from vllm.renderers.registry import RENDERER_REGISTRY
    from vllm.tokenizers.registry import TokenizerRegistry

    # Set, for `register` of either warns of a name that is taken.
    TokenizerRegistry.tokenizers[MODE] = ("k3hal.vllm.tokenizer", "K3Tokenizer")
    RENDERER_REGISTRY.renderers[MODE] = ("k3hal.vllm.renderer", "K3Renderer")
