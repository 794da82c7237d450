"""Which of vLLM's options K3's models take, and which platform the plugin builds on. Knows no vLLM: stand-ins do."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from k3hal.errors import UnsupportedError, UsageError
from k3hal.vllm import limits
from k3hal.vllm.names import MODELS


def options(**changed: Any) -> Any:
    """A vLLM config that is fine, but for `changed`: `cache__block_size=1` is `cache_config.block_size`."""
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=1, decode_context_parallel_size=1, enable_expert_parallel=False, use_ubatching=False
        ),
        speculative_config=None,
        lora_config=None,
        cache_config=SimpleNamespace(
            mamba_cache_mode="align", mamba_ssm_cache_dtype="auto", mamba_cache_dtype="auto",
            block_size=128, user_specified_block_size=False, enable_prefix_caching=True,
        ),
        scheduler_config=SimpleNamespace(enable_chunked_prefill=True, max_num_batched_tokens=256),
        load_config=SimpleNamespace(load_format="auto"),
        model_config=SimpleNamespace(
            use_mla=True, architecture="KimiLinearForCausalLM", tokenizer_mode="kimi_k3", quantization=None,
            hf_overrides={}, enable_prompt_embeds=False, runner_type="generate",
        ),
        attention_config=SimpleNamespace(backend=None),
        offload_config=SimpleNamespace(
            uva=SimpleNamespace(cpu_offload_gb=0), prefetch=SimpleNamespace(offload_group_size=0)
        ),
        compilation_config=SimpleNamespace(mode=None, cudagraph_mode=None),
    )  # fmt: skip
    for name, value in changed.items():
        part, _, field = name.partition("__")
        setattr(getattr(config, f"{part}_config") if field else config, field or part, value)
    return config


def test_usual_options_are_taken() -> None:
    limits.check(options())
    limits.check(options(cache__mamba_cache_mode="none", load__load_format="dummy"))


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"parallel__pipeline_parallel_size": 2}, "--pipeline-parallel-size"),
        ({"parallel__decode_context_parallel_size": 2}, "--decode-context-parallel-size"),
        ({"parallel__enable_expert_parallel": True}, "--enable-expert-parallel"),
        ({"speculative_config": object()}, "--speculative-config"),
        ({"lora_config": object()}, "--enable-lora"),
        ({"cache__mamba_cache_mode": "all"}, "--mamba-cache-mode all"),
        ({"cache__mamba_ssm_cache_dtype": "bfloat16"}, "--mamba-ssm-cache-dtype"),
        ({"cache__mamba_cache_dtype": "float32"}, "--mamba-cache-dtype"),
        ({"load__load_format": "tensorizer"}, "--load-format"),
        ({"model__quantization": "fp8"}, "--quantization"),
        ({"model__hf_overrides": {"num_hidden_layers": 2}}, "--hf-overrides"),
        ({"model__hf_overrides": lambda config: config}, "--hf-overrides"),
        ({"model__enable_prompt_embeds": True}, "--enable-prompt-embeds"),
        ({"model__runner_type": "pooling"}, "--runner pooling"),
        ({"attention__backend": "TRITON_MLA"}, "--attention-backend"),
        ({"offload__uva": SimpleNamespace(cpu_offload_gb=4.0)}, "--cpu-offload-gb"),
        ({"offload__prefetch": SimpleNamespace(offload_group_size=8)}, "--offload-group-size"),
        ({"parallel__use_ubatching": True}, "--enable-dbo"),
        ({"model__use_mla": False}, "VLLM_MLA_DISABLE"),
    ],
)
def test_what_there_is_not_is_refused_by_its_option(changed: dict[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedError, match=f"do not take {says} in vLLM"):
        limits.check(options(**changed))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`machine(cpu="path", plugins=[...])` is the plugin's platform module on a machine where vLLM finds that."""

    def make(*, plugins: tuple[str, ...] = (), allowed: list[str] | None = None, **found: str) -> Any:
        platforms, envs, vllm, config = (ModuleType(name) for name in ("platforms", "envs", "vllm", "config"))
        detect = {name: (lambda path=path: path) for name, path in found.items()}
        platforms.builtin_platform_plugins = {"tpu": lambda: None, **detect}  # pyright: ignore[reportAttributeAccessIssue]
        envs.VLLM_PLUGINS = allowed  # pyright: ignore[reportAttributeAccessIssue]
        vllm.envs = envs  # pyright: ignore[reportAttributeAccessIssue]
        config.CompilationMode = SimpleNamespace(NONE=0)  # pyright: ignore[reportAttributeAccessIssue]
        config.CUDAGraphMode = SimpleNamespace(NONE=0)  # pyright: ignore[reportAttributeAccessIssue]
        modules = {"vllm": vllm, "vllm.platforms": platforms, "vllm.envs": envs, "vllm.config": config}
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        entries = [EntryPoint(name, f"{name}:register", "vllm.platform_plugins") for name in plugins]
        monkeypatch.setattr("importlib.metadata.entry_points", lambda group: entries)
        monkeypatch.setattr("k3hal.vllm.compat.refusal", lambda: None)
        return importlib.reload(importlib.import_module("k3hal.vllm.platform"))

    return make


def test_it_builds_on_the_machines_own_platform(machine: Callable[..., Any]) -> None:
    for vendor in ("cpu", "cuda", "rocm"):
        assert machine(**{vendor: "there.Platform"}).platform() == "k3hal.vllm.platform.K3HALPlatform"


@pytest.mark.parametrize(
    ("found", "says"),
    [
        ({"xpu": "there.XPU"}, "it has no operators for xpu"),
        ({}, "a machine that vLLM knows no platform of"),
        ({"cpu": "a.A", "cuda": "b.B"}, "more than one platform here: cpu, cuda"),
        ({"plugins": ("vllm_ascend",)}, "vllm-ascend is the platform"),
    ],
)
def test_it_stands_aside_in_one_line(
    machine: Callable[..., Any], caplog: pytest.LogCaptureFixture, found: dict[str, Any], says: str
) -> None:
    caplog.set_level("INFO", logger="vllm.k3hal")
    module = machine(**found)
    assert module.platform() is None
    module.say_if_aside()
    module.say_if_aside()
    (line,) = caplog.messages
    assert line.startswith("k3hal stands aside: ") and says in line


def test_only_the_process_that_was_asked_says_so(
    machine: Callable[..., Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO", logger="vllm.k3hal")
    module = machine(xpu="there.XPU")
    monkeypatch.setattr("multiprocessing.parent_process", lambda: SimpleNamespace(pid=1))
    module.say_if_aside()
    assert caplog.messages == []


def test_it_stands_aside_when_told_to(machine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K3HAL_VLLM", "0")
    assert machine(cpu="there.Platform").platform() is None


def test_on_ascend_it_builds_on_the_plugin_that_was_left_out(machine: Callable[..., Any]) -> None:
    module = machine(plugins=("vllm_ascend",), allowed=["k3hal"])
    assert module._choose() == ("vllm_ascend.platform.NPUPlatform", "")


class WithoutMla:
    """As a platform whose own MLA is slow: for every model that has one it gives things up."""

    @classmethod
    def check_and_update_config(cls, config: Any) -> None:
        config.cache_config.block_size = 16
        config.cache_config.enable_prefix_caching = False
        config.scheduler_config.enable_chunked_prefill = False
        config.scheduler_config.max_num_batched_tokens = 1 << 20


@pytest.mark.parametrize("architecture", [*MODELS, "LlamaForCausalLM"])
def test_what_the_platform_gives_up_for_its_own_attention_stays_for_k3_alone(
    machine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, architecture: str
) -> None:
    module = machine(cpu=f"{__name__}.WithoutMla")
    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or ModuleType(__name__))
    monkeypatch.setattr(sys.modules[__name__], "WithoutMla", WithoutMla, raising=False)
    config = options(
        model__architecture=architecture, cache__user_specified_block_size=True, cache__block_size=96,
        parallel__worker_extension_cls="",
    )  # fmt: skip
    module.platform_class().check_and_update_config(config)
    ours = architecture in MODELS
    assert config.cache_config.block_size == (96 if ours else 16)
    assert config.cache_config.enable_prefix_caching is ours and config.scheduler_config.enable_chunked_prefill is ours
    assert (config.scheduler_config.max_num_batched_tokens == 256) is ours
    assert (config.compilation_config.mode == 0) is ours


@pytest.fixture
def platform_class(machine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    module = machine(cpu=f"{__name__}.WithoutMla")
    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or ModuleType(__name__))
    monkeypatch.setattr(sys.modules[__name__], "WithoutMla", WithoutMla, raising=False)
    return module.platform_class()


@pytest.mark.parametrize("architecture", MODELS)
def test_what_is_wrong_is_refused_as_soon_as_options_are_known(
    platform_class: Any, monkeypatch: pytest.MonkeyPatch, architecture: str
) -> None:
    config = options(model__architecture=architecture, parallel__worker_extension_cls="")
    platform_class.check_and_update_config(config)
    config.model_config.quantization = "fp8"
    with pytest.raises(UnsupportedError, match="do not take --quantization"):
        platform_class.check_and_update_config(config)
    monkeypatch.setenv("K3HAL_SHADOW", "nothing_like_it")
    with pytest.raises(UsageError, match="K3HAL_SHADOW"):
        platform_class.check_and_update_config(config)


def test_what_is_wrong_for_k3_is_not_for_others(platform_class: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K3HAL_SHADOW", "nothing_like_it")
    platform_class.check_and_update_config(options(model__architecture="LlamaForCausalLM", model__quantization="fp8"))


@pytest.mark.parametrize("folder", ["ranks", "own"])
def test_the_platform_gives_k3_its_workers_extension_and_tokenizer(
    platform_class: Any, tmp_path: Path, folder: str
) -> None:
    (tmp_path / "tiktoken.model").touch()
    if folder == "own":
        (tmp_path / "tokenizer_config.json").touch()
    config = options(parallel__worker_extension_cls="", model__tokenizer_mode="auto")
    config.model_config.tokenizer = str(tmp_path)
    platform_class.check_and_update_config(config)
    assert config.parallel_config.worker_extension_cls == "k3hal.vllm.observe.WorkerExtension"
    assert config.model_config.tokenizer_mode == ("kimi_k3" if folder == "ranks" else "auto")


def test_a_misspelt_variable_stops_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    from k3hal.vllm.register import register

    monkeypatch.setattr("k3hal.vllm.register.refusal", lambda: None)
    monkeypatch.setenv("K3HAL_SHADOWS", "x")
    with pytest.raises(UsageError, match="unknown environment variable K3HAL_SHADOWS"):
        register()
    monkeypatch.setenv("K3HAL_VLLM", "0")
    register()
