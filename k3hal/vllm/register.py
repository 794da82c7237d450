"""What vLLM's general plugin does, in every process: K3HAL's models and attention backends get their names."""
# pyright: reportMissingImports=false

from __future__ import annotations

import os

from k3hal.env import check_environment
from k3hal.vllm.compat import refusal
from k3hal.vllm.names import BACKENDS, KDA_BACKEND, MLA_BACKEND, MODELS, SWITCH
from k3hal.vllm.platform import say_if_aside


def register() -> None:
    """Entry point `vllm.general_plugins`. May be called again and again.

    Raises `UsageError` for an unknown `K3HAL_*` variable.
    """
    say_if_aside()
    if os.environ.get(SWITCH) == "0" or refusal():
        return
    check_environment(os.environ)
    # Importing vLLM's registries loads the platform, so not before the plugin is wanted.
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, MambaAttentionBackendEnum

    from k3hal.vllm import frontend
    from k3hal.vllm.quantization import UnquantizedToVllm

    for kind, name in ((MambaAttentionBackendEnum, KDA_BACKEND), (AttentionBackendEnum, MLA_BACKEND)):
        # A cache spec carries the name from process to process: it has to be there before one is unpickled.
        if name not in kind.__members__:
            kind.register(name, BACKENDS[name])
    for architecture, target in MODELS.items():
        ModelRegistry.register_model(architecture, target)
        MODELS_CONFIG_MAP[architecture] = UnquantizedToVllm
    frontend.register()
