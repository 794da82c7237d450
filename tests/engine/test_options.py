"""Options, generation defaults and the memory plan: what is accepted, and what each refusal says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from k3hal.dispatch.device import DeviceDescription
from k3hal.engine.build import build_engine, choose_dtypes
from k3hal.engine.cache.layout import CacheLayout
from k3hal.engine.generation_config import read_generation_config
from k3hal.engine.memory import GB, Needs, estimated_needs, plan_memory, workspace_bytes
from k3hal.engine.options import EngineOptions
from k3hal.engine.sampling import GenerationDefaults
from k3hal.errors import CapacityError, ConfigError, UsageError
from k3hal.model.config import ModelConfig
from k3hal.model.presets import preset_config


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_length": 5}, "unknown engine option 'max_model_length'.*max_model_len"),
        ({"dtype": "float16"}, "dtype is 'float16'.*float32"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype is 'int8'"),
        ({"fallback": "never"}, "fallback is 'never'"),
        ({"max_model_len": 0}, "max_model_len is 0"),
        ({"max_model_len": 1}, "max_model_len is 1"),
        ({"max_model_len": "2k"}, "max_model_len is '2k'"),
        ({"max_num_seqs": True}, "max_num_seqs is True"),
        ({"max_num_seqs": 2.0}, "max_num_seqs is 2.0"),
        ({"max_num_batched_tokens": -5}, "max_num_batched_tokens is -5"),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 7}, "below max_num_seqs 8"),
        ({"max_queue": -1}, "max_queue is -1"),
        ({"async_depth": 0}, "async_depth is 0"),
        ({"async_depth": 4}, "async_depth is 4.*at most 3"),
        ({"memory_budget": 0}, "memory_budget is 0"),
        ({"memory_budget": "4GB"}, "memory_budget is '4GB'"),
        ({"memory_budget": float("nan")}, "memory_budget is nan"),
        ({"memory_budget": float("inf")}, "memory_budget is inf"),
        ({"prefix_cache_policy": "lru"}, "unknown prefix cache policy 'lru'.*second-hit"),
        ({"prefix_cache_policy": 3}, "prefix_cache_policy is 3"),
        ({"prefix_cache_policy": "interval"}, "'interval' has no interval"),
        ({"prefix_cache_policy": "interval:0"}, "'interval:0' has no interval"),
        ({"prefix_cache_policy": "cost", "prefix_cache_retention_interval": 512}, "policy is 'cost'.*interval"),
        ({"prefix_cache_policy": "interval", "prefix_cache_retention_interval": 0}, "retention_interval is 0"),
        ({"prefix_cache_policy": "interval", "prefix_cache_retention_interval": 10**30}, "has an interval of.*at most"),
        ({"prefix_cache_policy": f"interval:{'9' * 5000}"}, "has an interval of 9.*at most"),
        ({"prefix_match_unit": 0}, "prefix_match_unit is 0"),
        ({"prefix_host_cache_gb": 0}, "prefix_host_cache_gb is 0"),
        ({"prefix_host_cache_gb": "much"}, "prefix_host_cache_gb is 'much'"),
        ({"prefix_disk_cache": 3}, "prefix_disk_cache is 3.*folder"),
        ({"prefix_disk_cache": ""}, "prefix_disk_cache is ''.*folder"),
        ({"prefix_disk_cache": "a\0b"}, "prefix_disk_cache is 'a.*folder"),
        ({"prefix_mooncake": ""}, "prefix_mooncake is ''.*file"),
        ({"tokenizer": ""}, "tokenizer is ''.*folder"),
        ({"prefix_disk_cache": "x", "prefix_disk_cache_gb": 1e300}, "prefix_disk_cache_gb is 1e\\+300.*at most"),
        ({"prefix_disk_cache": "x", "prefix_disk_cache_gb": -1}, "prefix_disk_cache_gb is -1"),
        ({"prefix_disk_cache": "x", "prefix_mooncake": "y"}, "both given.*one of them"),
        ({"prefix_mooncake": 3}, "prefix_mooncake is 3.*file"),
        ({"prefix_disk_cache_gb": 5}, "prefix_disk_cache_gb is given without"),
        ({"prefix_host_cache_gb": 1, "prefix_cache_policy": "none"}, "policy is 'none'.*another policy"),
        ({"mla_latent_norm_eps": "small"}, "mla_latent_norm_eps is 'small'"),
        ({"mla_latent_norm_eps": -1}, "mla_latent_norm_eps is -1"),
        ({"ops": {"kda_decode": "cpu"}}, "ops is {'kda_decode': 'cpu'}.*kda_decode=reference"),
        ({"plan": 3}, "plan is 3"),
        ({"tokenizer": ["a"]}, "tokenizer is \\['a'\\]"),
        ({"device": 0}, "device is 0"),
        ({"device": "gpu"}, "unknown device 'gpu'"),
        ({"device": "mi355x"}, "describes a machine that is not here"),
        ({"model": "/nowhere"}, "'/nowhere' is not a directory"),
    ],
)
def test_a_wrong_option_is_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        build_engine(options.pop("model", str(Path(__file__).parent)), **options)
    assert "\n" not in str(caught.value)


def test_none_means_not_given() -> None:
    options = EngineOptions.of(dtype=None, max_num_seqs=None, max_num_batched_tokens=16, max_queue=0)
    assert (options.dtype, options.num_seqs, options.queue) == ("auto", 16, 0)
    assert options.batched_tokens(on_cpu=True) == 16
    assert EngineOptions(max_num_seqs=1000).batched_tokens(on_cpu=True) == 1000


@pytest.mark.parametrize(
    ("asked", "features", "vendor", "expected"),
    [
        ({}, {"avx2"}, "cpu", (torch.float32, torch.float32)),
        ({}, {"amx_bf16"}, "cpu", (torch.bfloat16, torch.bfloat16)),
        ({}, set(), "nvidia", (torch.bfloat16, torch.bfloat16)),
        ({"kv_cache_dtype": "fp8"}, {"avx2"}, "cpu", (torch.float32, torch.float8_e4m3fn)),
        ({"kv_cache_dtype": "bf16"}, {"avx2"}, "cpu", (torch.bfloat16, torch.bfloat16)),
        ({"dtype": "float32"}, {"amx_bf16"}, "cpu", (torch.float32, torch.float32)),
    ],
)
def test_dtypes(asked: dict[str, Any], features: set[str], vendor: str, expected: tuple[torch.dtype, ...]) -> None:
    device = DeviceDescription(id="here", vendor=vendor, arch="any", features=frozenset(features))
    assert choose_dtypes(EngineOptions(**asked), device) == expected


def test_a_bf16_cache_under_float32_is_refused() -> None:
    device = DeviceDescription(id="cpu", vendor="cpu", arch="any")
    with pytest.raises(UsageError, match="kv_cache_dtype bf16 needs dtype bfloat16"):
        choose_dtypes(EngineOptions(dtype="float32", kv_cache_dtype="bf16"), device)


CONFIG = ModelConfig.from_json(preset_config("nano"))
LAYOUT = CacheLayout.of(CONFIG, torch.float32)


NEEDS = Needs(weights=10**7, workspace=10**7)


def plan(**changes: Any) -> Any:
    given = {
        "needs": NEEDS,
        "free": 10 * GB,
        "budget": None,
        "on_cpu": True,
        "max_model_len": None,
        "max_num_seqs": 4,
    }
    return plan_memory(CONFIG, LAYOUT, **{**given, **changes})


def test_the_cache_takes_what_the_sequences_need_and_no_more() -> None:
    made = plan(max_model_len=1000)
    assert made.num_runs == LAYOUT.runs_for(4, 1000)
    assert made.cache == made.num_runs * LAYOUT.run_bytes
    assert made.max_model_len == 1000


def test_a_budget_bounds_everything_and_the_length_follows() -> None:
    made = plan(budget=GB)
    assert made.total <= GB
    assert made.total > GB - LAYOUT.run_bytes
    longest = LAYOUT.longest_sequence(made.num_runs)
    assert longest is not None
    assert made.max_model_len == min(longest, CONFIG.max_position_embeddings)


def test_a_cpu_without_a_budget_takes_at_most_half_and_four_gb_of_cache() -> None:
    assert plan(free=100 * GB).cache <= 4 * GB
    small = plan(free=GB)
    assert small.total <= GB // 2
    assert plan(free=100 * GB, on_cpu=False, max_num_seqs=1000).cache > 50 * GB


@pytest.mark.parametrize(("max_model_len", "knob"), [(100_000, "--max-model-len"), (None, "--memory-budget")])
def test_what_does_not_fit_is_refused_with_the_gb_missing(max_model_len: int | None, knob: str) -> None:
    budget = 15 * 10**6
    with pytest.raises(CapacityError, match=r"([0-9.]+) GB are missing") as caught:
        plan(budget=budget, max_model_len=max_model_len)
    assert knob in str(caught.value)
    missing = float(str(caught.value).split(" GB are missing")[0].split()[-1])
    fits = plan(budget=budget + int((missing + 0.01) * GB), max_model_len=max_model_len)
    assert fits.max_model_len >= (max_model_len or LAYOUT.page_tokens)


def test_a_budget_beyond_what_is_free_is_refused_where_it_would_be_taken() -> None:
    with pytest.raises(CapacityError, match=r"lets the engine take [0-9.]+ GB, but only 0\.05 GB are free.*lower"):
        plan(free=5 * 10**7, budget=GB)
    assert plan(free=5 * 10**8, budget=GB, max_model_len=100, max_num_seqs=1).cache < 10**8


def test_figures_of_a_small_model_are_not_all_zero() -> None:
    with pytest.raises(CapacityError, match=r"Weights 0\.01 GB, workspace 0\.01 GB .* there are 0\.001 GB"):
        plan(budget=10**6)


def test_a_length_beyond_the_models_positions_is_refused() -> None:
    with pytest.raises(CapacityError, match=f"exceeds the model's {CONFIG.max_position_embeddings} positions"):
        plan(max_model_len=CONFIG.max_position_embeddings + 1)


@pytest.mark.parametrize(
    ("tokens", "rows", "flag"),
    [
        (512, 10**9, "free memory, or lower --max-num-seqs)"),
        (10**9, 10**9, "free memory, or lower --max-num-seqs)"),
        (10**9, 64, "free memory, or lower --max-num-batched-tokens)"),
    ],
)
def test_a_step_that_does_not_fit_is_refused_by_its_flag(tokens: int, rows: int, flag: str) -> None:
    with pytest.raises(CapacityError, match="GB are missing") as caught:
        plan(needs=estimated_needs(CONFIG, 10**7, 4, tokens, rows, counted=False, num_graphs=0))
    assert str(caught.value).endswith(flag)


@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens", "max_model_len", "prefix_match_unit"])
def test_sizes_beyond_32_bits_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match=rf"{name} is 2147483648 \(it is at most 2147483647\)"):
        EngineOptions.of(**{name: 2**31})
    assert EngineOptions.of(**{name: 2**31 - 1})


def test_workspace_grows_with_tokens_and_rows() -> None:
    sizes = [workspace_bytes(CONFIG, 4, tokens, rows).total for tokens, rows in ((1, 1), (512, 1), (512, 64))]
    assert sizes == sorted(sizes)
    assert sizes[0] > CONFIG.vocab_size * 4


def write(folder: Path, data: Any) -> Path:
    (folder / "generation_config.json").write_text(data if isinstance(data, str) else json.dumps(data))
    return folder


def test_generation_config(tmp_path: Path) -> None:
    assert read_generation_config(tmp_path, 100) == (GenerationDefaults(), ())
    data = {"temperature": 0.7, "top_p": None, "top_k": 20, "eos_token_id": [3, 4], "do_sample": True, "other": {}}
    defaults, ends = read_generation_config(write(tmp_path, data), 100)
    assert defaults == GenerationDefaults(temperature=0.7, top_k=20)
    assert ends == (3, 4)
    assert read_generation_config(write(tmp_path, {"eos_token_id": 7}), 100)[1] == (7,)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ([], "holds no JSON object"),
        ({"temperature": -1}, "temperature must be in"),
        ({"temperature": "hot"}, "temperature must be a finite number"),
        ({"top_p": 0}, "top_p must be in"),
        ({"top_k": 2.5}, "top_k must be an integer"),
        ({"eos_token_id": 100}, "eos_token_id holds 100"),
        ({"eos_token_id": "2"}, "eos_token_id holds '2'"),
        ({"eos_token_id": [True]}, "eos_token_id holds True"),
    ],
)
def test_a_malformed_generation_config_is_named(tmp_path: Path, data: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read_generation_config(write(tmp_path, data), 100)
    assert "generation_config.json" in str(caught.value)
