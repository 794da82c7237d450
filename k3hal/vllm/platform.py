"""The platform vLLM runs on: the machine's own, with what K3 needs of it put right."""
# pyright: reportMissingImports=false

from __future__ import annotations

import functools
import importlib
import logging
import multiprocessing
import os
from typing import Any

from k3hal.vllm.compat import refusal
from k3hal.vllm.cpu_wheel import answer_for_vllm
from k3hal.vllm.names import MODELS, SWITCH

_CARRIED = ("cuda", "rocm", "cpu")
"""vLLM's built-in platforms that K3HAL has providers for."""
_ASCEND = "vllm_ascend.platform.NPUPlatform"
_CLASS = "K3HALPlatform"

_log = logging.getLogger("vllm.k3hal")
"""A child of vLLM's own logger, whose handlers and level it shares."""


def platform() -> str | None:
    """Entry point `vllm.platform_plugins`: the platform's class, or None to stand aside."""
    if _choose()[0] is None:
        return None
    answer_for_vllm()
    return f"{__name__}.{_CLASS}"


def say_if_aside() -> None:
    """Log, once a server, why vLLM keeps a platform of its own: not when it is chosen, before vLLM logs anything."""
    base, reason = _choose()
    if base is None and multiprocessing.parent_process() is None:
        _say_once(f"k3hal stands aside: {reason}")


def __getattr__(name: str) -> Any:
    if name == _CLASS:
        return platform_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def platform_class() -> type:
    """The class over this machine's platform. Made when vLLM asks: what it derives from depends on the machine."""
    base, reason = _choose()
    if base is None:
        raise RuntimeError(f"no platform to build on: {reason}")
    module, _, name = base.rpartition(".")
    parent = getattr(importlib.import_module(module), name)
    return type(_CLASS, (_K3Config, parent), {"__doc__": f"{name}, where K3 runs too.", "__module__": __name__})


@functools.cache
def _choose() -> tuple[str | None, str]:
    """The path of the platform class to build on, or None and why there is none."""
    if os.environ.get(SWITCH) == "0":
        return None, f"{SWITCH} is 0"
    if refused := refusal():
        return None, refused
    from vllm.platforms import builtin_platform_plugins

    found = {name: path for name, detect in builtin_platform_plugins.items() if (path := detect())}
    if npu := _ascend():
        return npu
    known = [name for name in _CARRIED if name in found]
    if not known:
        return None, f"it has no operators for {', '.join(found) or 'a machine that vLLM knows no platform of'}"
    if len(found) > 1:
        return None, f"vLLM finds more than one platform here: {', '.join(found)}"
    return found[known[0]], ""


def _ascend() -> tuple[str | None, str] | None:
    """Where vllm-ascend is installed: vLLM takes one platform plugin, and that one has to be it unless left out."""
    from importlib.metadata import entry_points

    import vllm.envs

    others = [entry.name for entry in entry_points(group="vllm.platform_plugins") if "vllm_ascend" in entry.value]
    if not others:
        return None
    allowed = vllm.envs.VLLM_PLUGINS
    if allowed is None or set(others) & set(allowed):
        return None, "vllm-ascend is the platform; K3HAL's models are registered on it"
    return _ASCEND, ""


@functools.cache
def _say_once(line: str) -> None:
    # `LLM(...)` sets vLLM's logging up after it has loaded plugins: then Python's own last resort shows warnings.
    _log.log(logging.INFO if _log.hasHandlers() else logging.WARNING, line)


class _K3Config:
    """Mixed into a platform: what it decides for other models is not always right for K3's.

    Other models see the platform as it is.
    """

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """vLLM's hook, called once the options are known. Raises `UnsupportedError` for what K3's models do not take
        and `UsageError` for malformed variables: here, in the process that was asked, minutes before a worker would."""
        model = vllm_config.model_config
        if model is None or model.architecture not in MODELS:
            super().check_and_update_config(vllm_config)  # type: ignore[misc]
            return
        from k3hal.vllm import limits
        from k3hal.vllm.observe import check_asked, extend_worker
        from k3hal.vllm.tokenizer import choose_tokenizer_mode

        check_asked()
        choose_tokenizer_mode(model)
        _without_compilation(vllm_config)
        extend_worker(vllm_config)
        wanted = _AttentionChoices(vllm_config)
        super().check_and_update_config(vllm_config)  # type: ignore[misc]
        wanted.restore(vllm_config)
        limits.check(vllm_config)


def _without_compilation(vllm_config: Any) -> None:
    """The model text calls operators: there is nothing to compile, and no graph of pieces between them to capture."""
    from vllm.config import CompilationMode, CUDAGraphMode

    vllm_config.compilation_config.mode = CompilationMode.NONE
    vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE


class _AttentionChoices:
    """What a platform without a fast MLA of its own gives up, and K3HAL's attention does not have to."""

    def __init__(self, vllm_config: Any) -> None:
        cache, scheduler = vllm_config.cache_config, vllm_config.scheduler_config
        self.block_size = cache.block_size if cache.user_specified_block_size else None
        self.prefix_caching = cache.enable_prefix_caching
        self.chunked_prefill = scheduler.enable_chunked_prefill
        self.batched_tokens = scheduler.max_num_batched_tokens

    def restore(self, vllm_config: Any) -> None:
        cache, scheduler = vllm_config.cache_config, vllm_config.scheduler_config
        gave_up = cache.enable_prefix_caching, scheduler.enable_chunked_prefill
        if gave_up != (self.prefix_caching, self.chunked_prefill):
            cache.enable_prefix_caching, scheduler.enable_chunked_prefill = self.prefix_caching, self.chunked_prefill
            scheduler.max_num_batched_tokens = self.batched_tokens
        if self.block_size is not None:
            cache.block_size = self.block_size
