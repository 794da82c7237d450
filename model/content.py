"""What a generated checkpoint consists of, whatever its layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy.typing as npt

from k3hal.model.config import ModelConfig
from k3hal.model.init import random_tensor
from k3hal.model.layout import INDEX
from k3hal.model.manifest import TensorSpec, expected_tensors

Layout = Literal["published", "modelslim"]
LAYOUTS: dict[str, Layout] = {"published": "published", "modelslim": "modelslim"}


@dataclass(frozen=True, slots=True)
class Content:
    """All tensors, in order, and how each is made; `shard` is what shards' names begin with, `files` are further JSON
    files by name."""

    specs: tuple[TensorSpec, ...]
    tensor: Callable[[TensorSpec], npt.NDArray[Any]]
    index: str
    shard: str
    files: Mapping[str, Any] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.specs)


def published(config: ModelConfig, seed: int) -> Content:
    """In the layout that Kimi K3 and Kimi-Linear-48B are published in."""
    specs = tuple(expected_tensors(config))
    return Content(specs, lambda spec: random_tensor(config, spec, seed), INDEX, "model")
