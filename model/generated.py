"""Models without files: sizes from a config, weights drawn from a seed where the model runs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from k3hal.dispatch.errors import K3HALError
from k3hal.model.config import ModelConfig
from k3hal.model.init import Draw, draw_of
from k3hal.model.manifest import TensorSpec, expected_tensors
from k3hal.model.parallel import Shard
from k3hal.model.presets import BOS, END_OF_MSG, PAD

GENERATOR_VERSION = 1
"""Grows whenever the same name and seed would give other weights."""

_DTYPES = {"F32": torch.float32, "U8": torch.uint8}


@dataclass(frozen=True, slots=True)
class GeneratedModel:
    """A load source: the name it was asked for by, its config, the seed of its weights, and its text tensors."""

    name: str
    config: ModelConfig
    seed: int
    specs: Mapping[str, TensorSpec]
    notice: str

    @classmethod
    def of(cls, name: str, config: ModelConfig, *, seed: int = 0, notice: str = "random weights") -> GeneratedModel:
        """Special tokens are those of the synthetic vocabulary, which every generated model speaks.

        `notice` is a remark for whoever loads it.
        """
        config = replace(config, bos_token_id=BOS, eos_token_ids=(END_OF_MSG,), pad_token_id=PAD, vision=None)
        return cls(name, config, seed, {spec.name: spec for spec in expected_tensors(config)}, notice)

    def __str__(self) -> str:
        return self.name

    @property
    def total_bytes(self) -> int:
        """Bytes of the text tensors as a checkpoint would store them."""
        return sum(spec.nbytes for spec in self.specs.values())


class GeneratedReader:
    """A `Reader` that draws each tensor on the device, as `model.init` distributes it, from (seed, tensor name).

    The same device type, torch version and dtype give the same values; others need not. `progress` is called with the
    bytes a checkpoint would have stored.
    """

    def __init__(
        self,
        model: GeneratedModel,
        device: torch.device | str,
        dtype: torch.dtype,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self.model, self.dtype, self.device = model, dtype, torch.device(device)
        self._progress = progress
        self._generator = torch.Generator(device=self.device)
        self._taken: set[str] = set()

    def get(self, name: str, dtype: torch.dtype | None = None, *, shard: Shard | None = None) -> Tensor:
        """Tensor `name`, contiguous, on the reader's device."""
        spec = self._spec(name)
        kind = _DTYPES.get(spec.dtype, self.dtype) if dtype is None else dtype
        out = torch.empty(spec.shape, dtype=kind, device=self.device)
        self.fill(out, name, shard=shard)
        return out

    def fill(self, out: Tensor, name: str, *, shard: Shard | None = None) -> None:
        """Draw tensor `name` into `out`, of as many elements."""
        spec = self._spec(name)
        if shard is not None and shard.world != 1:
            raise K3HALError(f"tensor {name}: a generated model is one rank's part already, not one to be cut")
        if name in self._taken:
            raise K3HALError(f"tensor {name} is loaded twice")
        self._taken.add(name)
        digest = hashlib.sha256(f"{self.model.seed}:{name}".encode()).digest()
        self._generator.manual_seed(int.from_bytes(digest[:7], "little"))
        self._draw(out, draw_of(self.model.config, spec))
        if self._progress is not None:
            self._progress(spec.nbytes)

    def finish(self) -> None:
        """Raises `K3HALError`, a bug of the model text, when a tensor was not asked for."""
        left = [name for name in self.model.specs if name not in self._taken]
        if left:
            raise K3HALError(f"{len(left)} tensors were never loaded, the first is {left[0]}")

    def _spec(self, name: str) -> TensorSpec:
        spec = self.model.specs.get(name)
        if spec is None:
            raise K3HALError(f"the model asks for tensor {name}, which its config does not promise")
        return spec

    def _draw(self, out: Tensor, draw: Draw) -> None:
        drawn = out if draw.drawn == out.numel() else out.zero_().view(-1)[: draw.drawn]
        if draw.kind == "codes":
            drawn.random_(0, 256, generator=self._generator)
        elif draw.kind == "scales":
            exponents = 127 + int(draw.a) + torch.tensor([-1, 0, 0, 1], device=self.device)
            choice = torch.randint(0, 4, tuple(drawn.shape), generator=self._generator, device=self.device)
            drawn.copy_(exponents[choice])
        elif draw.kind == "normal":
            drawn.normal_(draw.a, draw.b, generator=self._generator)
        else:
            drawn.uniform_(draw.a, draw.b, generator=self._generator)
