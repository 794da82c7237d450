"""A checkpoint directory, checked against its config before a byte of weights is read."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3hal.dispatch.errors import CheckpointError, ConfigError
from k3hal.model.config import ModelConfig
from k3hal.model.config_fields import read_json_object
from k3hal.model.layout import CONFIG, INDEX, SINGLE_SHARD, SLIM_DESCRIPTION, SLIM_INDEX
from k3hal.model.manifest import VISION_PREFIXES, TensorSpec, accepted_dtypes, expected_tensors
from k3hal.model.modelslim import ModelSlim
from k3hal.model.safetensors_io import StoredTensor, read_header

_MISSING_LIMIT = 10_000
"""Missing tensors that are listed before the rest of the manifest is not looked at."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a directory holds: its config, where each tensor lies, and what each text tensor should become.

    `specs` are the text tensors the config promises, all of them present in `tensors`. `notices` are remarks worth
    showing once. `slim` is what msModelSlim says of its weights, where it wrote them; the config's experts are `int4`
    then.
    """

    path: Path
    config: ModelConfig
    tensors: Mapping[str, StoredTensor]
    specs: Mapping[str, TensorSpec]
    notices: tuple[str, ...]
    slim: ModelSlim | None = None

    @classmethod
    def open(cls, path: str | Path, *, mla_latent_norm_eps: float = 1e-6) -> Checkpoint:
        """Read config, index and shard headers of `path` and check them against each other.

        Raises `ConfigError` or `CheckpointError`: one line naming the first problem, what was expected, and how many
        more problems there are. Vision tensors are accepted, and skipped with one notice.
        """
        checkpoint, problems = inspect(path, mla_latent_norm_eps=mla_latent_norm_eps)
        if problems:
            more = f"; {len(problems) - 1} more problems" if len(problems) > 1 else ""
            raise CheckpointError(f"{checkpoint.path}: {problems[0]}{more}", hint="k3hal model verify lists them all")
        for notice in checkpoint.notices:
            _log.warning("%s: %s", checkpoint.path, notice)
        return checkpoint

    @property
    def name(self) -> str:
        """The directory's own name."""
        return self.path.name

    @property
    def total_bytes(self) -> int:
        """Stored bytes of the text tensors."""
        return sum(self.tensors[name].nbytes for name in self.specs)

    @property
    def shards(self) -> tuple[str, ...]:
        return tuple(sorted({tensor.shard for tensor in self.tensors.values()}))


def inspect(path: str | Path, *, mla_latent_norm_eps: float = 1e-6) -> tuple[Checkpoint, list[str]]:
    """The checkpoint as far as it can be read, and every problem found.

    Raises only when there is nothing to inspect: no directory, no usable config, no index or shard at all.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a directory; expected a checkpoint with {CONFIG} and {INDEX}")
    if not (folder / CONFIG).is_file():
        raise CheckpointError(f"{folder} holds no {CONFIG}; expected a checkpoint directory")
    config = ModelConfig.from_json(folder, mla_latent_norm_eps=mla_latent_norm_eps)
    slim = ModelSlim.read(folder)
    index = INDEX if slim is None else SLIM_INDEX
    weight_map, problems = _weight_map(folder, index)
    tensors, shard_problems = _read_shards(folder, index, weight_map)
    problems += shard_problems
    specs, missing = _expected(expected_tensors(config) if slim is None else slim.specs(config), tensors)
    if not shard_problems:  # an unreadable shard already explains what is missing
        problems += missing
    problems += _compare(config, specs, tensors)
    if len(missing) < _MISSING_LIMIT:
        problems += _unknown(specs, tensors)
    vision = [name for name in tensors if name.startswith(VISION_PREFIXES)]
    notices = (f"{len(vision)} vision tensors skipped: this build serves text only",) if vision else ()
    return Checkpoint(folder, config, tensors, specs, notices, slim), problems


def _weight_map(folder: Path, name: str) -> tuple[dict[str, str] | None, list[str]]:
    """Tensor name -> shard file name from the index; None for a checkpoint of one shard without an index."""
    path = folder / name
    if not path.is_file():
        if (folder / SINGLE_SHARD).is_file():
            return None, []
        if (folder / SLIM_INDEX).is_file():
            raise CheckpointError(f"{folder} holds {SLIM_INDEX} and no {SLIM_DESCRIPTION}; expected both or {INDEX}")
        raise CheckpointError(f"{folder} holds neither {name} nor {SINGLE_SHARD}; expected one of them")
    try:
        index = read_json_object(path, limit=1 << 30)
    except ConfigError as error:
        raise CheckpointError(error.message) from error
    mapping: Any = index.get("weight_map")
    if not isinstance(mapping, dict) or not mapping:
        raise CheckpointError(f"{path}: weight_map is {mapping!r:.60}; expected an object of tensor to shard name")
    clean: dict[str, str] = {}
    problems = []
    for tensor, shard in mapping.items():
        if _is_plain_name(shard):
            clean[tensor] = shard
        else:
            problems.append(
                f"{name} puts tensor {tensor} in {shard!r:.80}; expected a .safetensors file name in this directory"
            )
    return clean, problems


def _is_plain_name(shard: object) -> bool:
    """A file directly in the directory; anything that could lead elsewhere is refused by its spelling."""
    if not isinstance(shard, str) or not shard.endswith(".safetensors") or shard.startswith("."):
        return False
    return not set(shard) & {"/", "\\", ":", "\0"}


def _read_shards(
    folder: Path, index: str, weight_map: dict[str, str] | None
) -> tuple[dict[str, StoredTensor], list[str]]:
    """All tensors of all shards, and problems of shards and of the index of that name."""
    tensors: dict[str, StoredTensor] = {}
    problems: list[str] = []
    shards = [SINGLE_SHARD] if weight_map is None else sorted(set(weight_map.values()))
    for shard in shards:
        if not (folder / shard).is_file():
            count = sum(1 for value in (weight_map or {}).values() if value == shard)
            problems.append(f"shard {shard} is missing; expected to hold {count} tensors by {index}")
            continue
        try:
            found = read_header(folder / shard)
        except CheckpointError as error:
            problems.append(error.message)
            continue
        for tensor in found:
            problems += _index_problems(tensor, tensors, index, weight_map)
            tensors.setdefault(tensor.name, tensor)
        if weight_map is not None:
            problems += _not_in_shard(shard, found, index, weight_map)
    return tensors, problems


def _index_problems(
    tensor: StoredTensor, seen: Mapping[str, StoredTensor], index: str, weight_map: Mapping[str, str] | None
) -> list[str]:
    if tensor.name in seen:
        return [f"tensor {tensor.name} is in both {seen[tensor.name].shard} and {tensor.shard}; expected it once"]
    if weight_map is None or weight_map.get(tensor.name) == tensor.shard:
        return []
    place = weight_map.get(tensor.name, "no shard")
    return [f"shard {tensor.shard} holds tensor {tensor.name}; {index} puts it in {place}"]


def _not_in_shard(shard: str, found: Iterable[StoredTensor], index: str, weight_map: Mapping[str, str]) -> list[str]:
    present = {tensor.name for tensor in found}
    return [
        f"tensor {name} is not in shard {shard}, where {index} puts it"
        for name, place in weight_map.items()
        if place == shard and name not in present
    ]


def _expected(
    promised: Iterable[TensorSpec], tensors: Mapping[str, StoredTensor]
) -> tuple[dict[str, TensorSpec], list[str]]:
    """The text tensors of those that the config promises, and a problem for each that is not stored.

    Stops at `_MISSING_LIMIT` problems: a config whose sizes are absurd must not fill the memory with names.
    """
    specs: dict[str, TensorSpec] = {}
    missing: list[str] = []
    for spec in promised:
        if spec.is_vision:
            continue
        if spec.name not in tensors:
            missing.append(f"tensor {spec.name} is missing; expected {spec.dtype} {list(spec.shape)}")
            if len(missing) == _MISSING_LIMIT:
                break
        specs[spec.name] = spec
    return specs, missing


def _compare(config: ModelConfig, specs: Mapping[str, TensorSpec], tensors: Mapping[str, StoredTensor]) -> list[str]:
    """Problems of stored text tensors that the config promises in another shape or dtype."""
    stored = ((spec, tensors[name]) for name, spec in specs.items() if name in tensors)
    return [problem for spec, tensor in stored for problem in shape_problems(config, spec, tensor)]


def _unknown(specs: Mapping[str, TensorSpec], tensors: Mapping[str, StoredTensor]) -> list[str]:
    return [
        f"tensor {name} in {stored.shard} is unknown; the config promises no such tensor"
        for name, stored in tensors.items()
        if name not in specs and not name.startswith(VISION_PREFIXES)
    ]


def shape_problems(config: ModelConfig, spec: TensorSpec, stored: StoredTensor) -> list[str]:
    """Whether `stored` has the shape and a dtype that load as `spec`; at most one problem."""
    where = f"tensor {spec.name} in {stored.shard}"
    if stored.shape != spec.shape:
        return [f"{where} has shape {list(stored.shape)}; expected {list(spec.shape)}"]
    allowed = accepted_dtypes(config, spec)
    if stored.dtype not in allowed:
        return [f"{where} is {stored.dtype}; expected {' or '.join(allowed)}"]
    return []
