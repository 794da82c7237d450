"""Which checkpoint directory a MODEL argument means, and the default one, generated into the user's cache."""

from __future__ import annotations

from pathlib import Path

from k3hal.dispatch.cache_dir import HINT, cache_dir, using_cache
from k3hal.errors import InputError, UnsupportedError, UsageError

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


def resolve_model(model: str | None) -> Path:
    """The directory that `model` names; None is the default checkpoint.

    Raises `UnsupportedError` for `k3-slice:` sources and `UsageError` for anything else that is no directory.
    """
    if model is None:
        return default_checkpoint()
    if model.startswith("k3-slice:"):
        raise UnsupportedError(
            f"model {model!r}: slices of the full-size model are not available in this build",
            hint="name a checkpoint directory",
        )
    if Path(model).is_dir():
        return Path(model)
    from k3hal.model.presets import PRESETS

    if model in PRESETS:
        hint = f"make one with `k3hal model init --preset {model} DIR` and name DIR"
        raise UsageError(f"model {model!r} is a preset, not a directory", hint=hint)
    raise UsageError(
        f"model {model!r} is not a directory",
        hint="expected a checkpoint directory, or nothing for the built-in default",
    )
