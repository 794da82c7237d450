"""The settings most verbs share, merged in one place: YAML file < environment < command line."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt, ValidationError

from k3hal.dispatch.words import nearest
from k3hal.errors import ConfigError, K3HALError, UsageError


class Settings(BaseModel):
    """Common settings; a verb with more of its own subclasses this. None means "chosen by the engine"."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ops: str | None = None
    """Provider overrides, `OP_GLOB=PROVIDER_GLOB,…`."""
    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    kv_cache_dtype: Literal["auto", "bf16", "fp8"] = "auto"
    expert_activations: Literal["auto", "mxfp8"] = "auto"
    """What routed experts round their activations to."""
    memory_budget: PositiveFloat | None = None
    """GB (1e9 bytes) per device that the engine may use."""
    max_model_len: PositiveInt | None = None
    """Tokens of prompt and output together, per sequence."""
    max_num_seqs: PositiveInt | None = None
    max_num_batched_tokens: PositiveInt | None = None
    tokenizer: Path | None = None
    plan: Path | None = None
    """A saved dispatch plan to pin."""
    graphs: bool | None = None
    """Decode through captured graphs where the device has them."""
    draft: str | None = None
    """Who guesses tokens that a step then verifies: `ngram:N`."""

    def engine_options(self) -> dict[str, Any]:
        """What `build_engine` takes besides the model: every common setting."""
        return {name: getattr(self, name) for name in Settings.model_fields}


S = TypeVar("S", bound=Settings)

# Settings with a variable of their own.
_FROM_ENVIRONMENT = {"ops": "K3HAL_OPS", "api_key": "K3HAL_API_KEY"}


def load_settings(
    kind: type[S], flags: Mapping[str, Any], config: Path | None = None, environ: Mapping[str, str] | None = None
) -> S:
    """Merge `config` < `environ` < `flags` into a `kind`.

    `flags` maps field names to values, None where the flag was not given; names that are no field of `kind` are
    ignored, so that a command's whole `ctx.params` may be passed. Raises `UsageError` for a bad flag or variable and
    `ConfigError` for an unreadable file, an unknown key (naming the nearest) or a bad value in it.
    """
    environ = os.environ if environ is None else environ
    fields = kind.model_fields
    variables = {name: environ.get(variable) for name, variable in _FROM_ENVIRONMENT.items() if name in fields}
    layers: list[tuple[str, type[K3HALError], dict[str, Any]]] = [
        (f"{config}: ", ConfigError, read_config(config, fields) if config else {}),
        (
            "in the environment, ",
            UsageError,
            {name: value for name, value in variables.items() if value},
        ),
        ("--", UsageError, {k: v for k, v in flags.items() if k in fields and v is not None}),
    ]
    merged: dict[str, Any] = {}
    for source, error_class, values in layers:
        try:
            kind(**values)
        except ValidationError as error:
            raise error_class(f"{source}{_first_problem(error)}") from error
        merged |= values
    return kind(**merged)


def read_config(path: Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The file's keys as field names (`max-model-len` and `max_model_len` are equal); values are not checked yet."""
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeyLoader)
    except OSError as error:
        raise ConfigError(f"{path}: cannot read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot parse: {' '.join(str(error).split())}") from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected a mapping of settings, found {type(data).__name__}")
    values: dict[str, Any] = {}
    for key, value in data.items():
        name = str(key).replace("-", "_")
        if name not in fields:
            raise ConfigError(f"{path}: unknown key {key!r}", hint=nearest(name, fields))
        if name in values:
            raise ConfigError(f"{path}: {key!r} is given twice")
        values[name] = value
    return values


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML's safe subset, with repeated keys refused instead of the last one winning."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be a name", key_node.start_mark)
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key_node.value!r} is given twice", key_node.start_mark
                )
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)


def _first_problem(error: ValidationError) -> str:
    """One line for the first field that is wrong: `max-model-len: input should be greater than 0, got -1`."""
    problem = error.errors(include_url=False)[0]
    name = "-".join(str(part) for part in problem["loc"]).replace("_", "-")
    return f"{name}: {problem['msg'][0].lower()}{problem['msg'][1:]}, got {problem['input']!r}"
