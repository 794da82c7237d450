"""What a MODEL argument means: a checkpoint directory, a generated model, or the default in the user's cache."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING

from k3hal.dispatch.cache_dir import HINT, cache_dir, using_cache
from k3hal.errors import InputError, UsageError

if TYPE_CHECKING:
    from k3hal.model.checkpoint import Checkpoint
    from k3hal.model.config import ModelConfig
    from k3hal.model.config_parts import ExpertActivations
    from k3hal.model.generated import GeneratedModel

DEFAULT_PRESET = "nano"
DEFAULT_SEED = 0


def default_checkpoint() -> Path:
    """The embedded default: preset nano, seed 0, generated on first use.

    The path carries the generator's version, so a changed generator makes a new one; the directory's own name is what
    a server calls the model. Processes may race: each writes aside, the first to finish wins and the others use its
    result.
    """
    from k3hal.model.progress import progress_bar
    from k3hal.model.write import GENERATOR_VERSION, preset_bytes, write_preset

    version = f"generator-{GENERATOR_VERSION}-seed-{DEFAULT_SEED}"
    target = cache_dir() / "checkpoints" / version / DEFAULT_PRESET
    with using_cache(target):
        if target.is_dir():
            return target
    try:
        with progress_bar("generating the default model", preset_bytes(DEFAULT_PRESET)) as progress:
            write_preset(DEFAULT_PRESET, target, seed=DEFAULT_SEED, progress=progress)
    except InputError as error:
        if not target.is_dir():
            raise InputError(
                f"the default model cannot be generated: {error.message}",
                hint=f"{HINT}, or name a checkpoint directory",
            ) from error
    return target


def resolve_model(model: str | None) -> Path | GeneratedModel:
    """What `model` names: a directory, or a model generated where it runs; None is the default checkpoint.

    `k3-slice:N` are N full-size layers of Kimi K3, `k3-slice:N@tpM` one rank's part of them, `random:NAME` a whole
    model of random weights. Raises `UsageError` for anything else that is no directory.
    """
    if model is None:
        return default_checkpoint()
    if generated := generated_model(model):
        return generated
    if Path(model).is_dir():
        return Path(model)
    from k3hal.model.presets import PRESETS

    if model in PRESETS:
        hint = f"make one with `k3hal model init --preset {model} DIR` and name DIR"
        raise UsageError(f"model {model!r} is a preset, not a directory", hint=hint)
    raise UsageError(
        f"model {model!r} is not a directory",
        hint="expected a checkpoint directory, a source like k3-slice:4@tp8, or nothing for the built-in default",
    )


def generated_model(name: str) -> GeneratedModel | None:
    """The model of a source's name; None for a name that is no source's. Raises `UsageError` for a malformed one."""
    kind, colon, rest = name.partition(":")
    if colon and kind == "k3-slice":
        return _slice(name, rest)
    if colon and kind == "random":
        return _random(name, rest)
    return None


def open_model(
    source: Path | GeneratedModel, *, mla_latent_norm_eps: float = 1e-6, expert_activations: ExpertActivations = "auto"
) -> Checkpoint | GeneratedModel:
    """The checked checkpoint of a directory, or the generated model itself, whose config says what a loader chooses.

    Raises as `Checkpoint.open` and `ModelConfig.with_expert_activations` do.
    """
    if isinstance(source, Path):
        from k3hal.model.checkpoint import Checkpoint

        opened = Checkpoint.open(source, mla_latent_norm_eps=mla_latent_norm_eps)
    else:
        opened = replace(source, config=replace(source.config, latent_norm_eps=mla_latent_norm_eps))
    return replace(opened, config=opened.config.with_expert_activations(expert_activations))


def tokenizer_folder(source: Path | GeneratedModel) -> Path:
    """Where a source's `tiktoken.model` and generation_config.json are: a generated model speaks the default one's."""
    return source if isinstance(source, Path) else default_checkpoint()


def _slice(model: str, text: str) -> GeneratedModel:
    from k3hal.model.generated import GeneratedModel
    from k3hal.model.slice import FIRST_LAYER, slice_of

    match = re.fullmatch(r"(\d{1,4})(?:@tp(\d{1,4}))?", text, re.ASCII)
    if not match or 0 in (count := int(match[1]), ranks := int(match[2] or 1)):
        raise UsageError(f"model {model!r} is no slice", hint="k3-slice:N or k3-slice:N@tpM, like k3-slice:4@tp8")
    notice = f"random weights; layers {FIRST_LAYER} to {FIRST_LAYER + count - 1} of Kimi K3"
    if ranks > 1:
        notice += f" as rank 0 of {ranks} holds them; its partial sums are used as they are, without collectives"
    return GeneratedModel.of(model, slice_of(full_size_config(), count, ranks), notice=notice)


def _random(model: str, name: str) -> GeneratedModel:
    from k3hal.model.config import ModelConfig
    from k3hal.model.generated import GeneratedModel
    from k3hal.model.presets import PRESETS, kimi_linear_48b, preset_config

    if name == "kimi-linear-48b":
        return GeneratedModel.of(model, ModelConfig.from_json(kimi_linear_48b()))
    if name in PRESETS:
        return GeneratedModel.of(model, ModelConfig.from_json(preset_config(name)))
    names = ", ".join(f"random:{known}" for known in ("kimi-linear-48b", *PRESETS))
    raise UsageError(f"model {model!r} is unknown", hint=f"random weights of: {names}")


def full_size_config() -> ModelConfig:
    """The published config of Kimi K3."""
    from k3hal.model.config import ModelConfig

    with as_file(files("k3hal.model") / "configs" / "kimi_k3.json") as path:
        return ModelConfig.from_json(path)
