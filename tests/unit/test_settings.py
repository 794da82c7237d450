"""Settings merge in one order, and each malformed source names itself, the key and what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3hal.env import VARIABLES, check_environment
from k3hal.errors import ConfigError, UsageError
from k3hal.serve.settings import ServeSettings
from k3hal.settings import Settings, load_settings


class ServeLike(Settings):
    """A verb's settings with one of its own."""

    port: int = 8000


def _write(folder: Path, text: str | bytes) -> Path:
    path = folder / "k3.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_defaults() -> None:
    settings = load_settings(Settings, {}, environ={})
    assert (settings.device, settings.dtype, settings.ops, settings.max_num_seqs) == ("auto", "auto", None, None)


@given(file=st.booleans(), env=st.booleans(), flag=st.booleans())
def test_order_is_file_environment_flags(tmp_path_factory: Any, file: bool, env: bool, flag: bool) -> None:
    config = _write(tmp_path_factory.mktemp("order"), "ops: a=file") if file else None
    environ = {"K3HAL_OPS": "a=env"} if env else {}
    settings = load_settings(Settings, {"ops": "a=flag" if flag else None}, config, environ)
    assert settings.ops == ("a=flag" if flag else "a=env" if env else "a=file" if file else None)


def test_file_takes_both_spellings_and_the_verb_s_own_keys(tmp_path: Path) -> None:
    config = _write(tmp_path, "max-model-len: 64\nmax_num_seqs: 2\nport: 9000\nplan: p.json\nmemory-budget: 1.5\n")
    settings = load_settings(ServeLike, {"as_json": True, "config": "ignored"}, config, {})
    assert (settings.max_model_len, settings.max_num_seqs, settings.port) == (64, 2, 9000)
    assert (settings.plan, settings.memory_budget) == (Path("p.json"), 1.5)


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    assert load_settings(Settings, {}, _write(tmp_path, "# nothing\n"), {}) == Settings()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max-model-length: 3", "unknown key 'max-model-length' (did you mean 'max_model_len'?)"),
        ("max_num_seqs: 0", "max-num-seqs: input should be greater than 0, got 0"),
        ("max-num-seqs: many", "max-num-seqs: input should be a valid integer"),
        ("dtype: float16", "dtype: input should be 'auto', 'float32' or 'bfloat16', got 'float16'"),
        ("memory-budget: -1", "memory-budget: input should be greater than 0, got -1"),
        ("memory-budget: .nan", "memory-budget: input should be"),
        ("device: [cpu]", "device: input should be a valid string, got ['cpu']"),
        ("device: cpu\ndevice: cuda", "cannot parse: 'device' is given twice"),
        ("max-num-seqs: 1\nmax_num_seqs: 2", "'max_num_seqs' is given twice"),
        ("- device", "expected a mapping of settings, found list"),
        ("cpu", "expected a mapping of settings, found str"),
        ("device: [", "cannot parse"),
        ("device: !!python/object/apply:os.getcwd []", "cannot parse"),
        ("[1, 2]: x", "cannot parse"),
        (b"device: \xff", "cannot parse"),
        ("3: x", "unknown key 3"),
    ],
)
def test_a_bad_file_is_one_line_that_names_it(tmp_path: Path, text: str | bytes, message: str) -> None:
    config = _write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_settings(Settings, {}, config, {})
    assert str(caught.value).startswith(f"{config}: {message}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["absent.yaml", ""])
def test_an_unreadable_file(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        load_settings(Settings, {}, tmp_path / name, {})


def test_expert_activations(tmp_path: Path) -> None:
    config = _write(tmp_path, "expert-activations: mxfp8")
    assert load_settings(Settings, {}, config, {}).engine_options()["expert_activations"] == "mxfp8"
    assert load_settings(Settings, {"expert_activations": "auto"}, config, {}).expert_activations == "auto"
    with pytest.raises(ConfigError, match="expert-activations: input should be 'auto' or 'mxfp8', got 'fp8'"):
        load_settings(Settings, {}, _write(tmp_path, "expert-activations: fp8"), {})


def test_a_bad_flag_is_named_as_a_flag() -> None:
    with pytest.raises(UsageError, match=r"^--kv-cache-dtype: input should be .* got 'int3'"):
        load_settings(Settings, {"kv_cache_dtype": "int3"}, None, {})


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"K3HAL_OPZ": ""}, r"unknown environment variable K3HAL_OPZ \(did you mean 'K3HAL_OPS'\?\)"),
        ({"K3HAL_": ""}, r"unknown environment variable K3HAL_ "),
        ({"K3HAL_ZZZZZZZZZZZZ": ""}, r"known: K3HAL_API_KEY, K3HAL_DEBUG, K3HAL_DUMP, K3HAL_OPS, K3HAL_SHADOW"),
        ({"K3HAL_DEBUG": "yes"}, r"K3HAL_DEBUG is 'yes' \(it takes 0 or 1\)"),
    ],
)
def test_a_bad_environment(environ: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_environment(environ)


def test_a_good_environment_passes() -> None:
    check_environment({"K3HAL_DEBUG": "0", "K3HAL_OPS": "a=b", "k3hal_ops": "", "PATH": "/bin"})
    assert len(VARIABLES) <= 10


@pytest.mark.parametrize(
    ("given", "engine"),
    [({}, "auto"), ({"warm_up": "full"}, "auto"), ({"warm_up": "quick"}, "off"), ({"warm_up": False}, "off")],
)
def test_the_engine_tries_its_largest_steps_only_before_a_full_warm_up(given: dict[str, Any], engine: str) -> None:
    assert ServeSettings.model_validate(given).engine_options()["warm_up"] == engine
