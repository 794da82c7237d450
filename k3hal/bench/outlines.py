"""Samples of full size without their memory: small tensors are real, large ones have a shape, a dtype and no values."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

MOST_REAL = 1 << 22
"""Elements of the largest tensor with values: what a cost depends on (lengths, the experts chosen) is smaller."""

_INDEX_PUT = {torch.ops.aten.index_put_.default, torch.ops.aten.index_put.default}
_NONZERO = torch.ops.aten.nonzero.default
_META = torch.device("meta")


class Outlines(TorchDispatchMode):
    """While active, a tensor of more than `MOST_REAL` elements is made on torch's meta device, and with it all that is
    computed from it; what has no elements stays real.

    `nonzero` finds nothing in a tensor without values. Any other reading of its values raises torch's own errors, and
    writing them into a real tensor raises `RuntimeError`. Large tensors take nothing from a generator: what is drawn
    after them is drawn alike, but is not the same.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch would import its compiler, which takes seconds; nothing is compiled here."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, named)) if isinstance(leaf, Tensor)]
        if not given and _elements(args) > MOST_REAL:
            return func(*args, **{**named, "device": _META, **({"generator": None} if "generator" in named else {})})
        if not any(tensor.is_meta for tensor in given):
            return func(*args, **named)
        first = args[0]
        if func._schema.is_mutable and isinstance(first, Tensor) and not first.is_meta:
            raise RuntimeError(f"{func} writes what has no values into a tensor that has")
        if func in _INDEX_PUT:
            # A mask says where only by its values; the result is shaped as what is written to.
            return first
        if func is _NONZERO:
            return torch.empty(0, first.dim(), dtype=torch.int64)
        moved_args, moved = tree_map(_to_meta, (args, named))
        if "device" in moved:
            moved["device"] = _META
        return tree_map(_real_if_empty, func(*moved_args, **moved))


def _elements(args: tuple[Any, ...]) -> int:
    """Elements of what a factory function makes, by its shape; 0 where it takes numbers (`arange`), which stay real."""
    shape = next((arg for arg in args if isinstance(arg, (list, tuple))), (0,))
    return prod(int(size) for size in shape)


def _to_meta(value: Any) -> Any:
    return value.to(_META) if isinstance(value, Tensor) else value


def _real_if_empty(value: Any) -> Any:
    return torch.empty(value.shape, dtype=value.dtype) if isinstance(value, Tensor) and not value.numel() else value
