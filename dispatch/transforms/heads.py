"""Heads that a vendor's kernels do not take: more are computed, and thrown away."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor
from torch.nn.functional import pad

from k3hal.dispatch.transforms.transform import After, Arguments, part_of

Rule: TypeAlias = Callable[[int], int]
"""How many heads are computed where so many are asked for; at least as many."""


def multiple_of(tile: int) -> Rule:
    """The next multiple of `tile`: 12 and 6 heads become 16 of 16."""
    return lambda heads: -(-heads // tile) * tile


def power_of_two(heads: int) -> int:
    """The next power of two: 6 heads become 8, 12 become 16, 96 become 128."""
    return 1 << max(heads - 1, 0).bit_length()


def padded(x: Tensor, dim: int, to: int) -> Tensor:
    """`x` with zeros behind it in one dimension, which then is `to` long; `x` itself where it already is."""
    missing = to - x.shape[dim]
    if not missing:
        return x
    after = x.ndim - 1 - dim % x.ndim
    return pad(x, (*[0] * (2 * after), 0, missing))


@dataclass(frozen=True, slots=True)
class PaddedHeads:
    """Arguments `inputs` and `outputs` (name: dimension of the heads) and the result padded with heads of zeros.

    `outputs` are tensors that the function writes into, wholly: what it wrote of the real heads is copied back. A
    padded query of zeros gives a plain mean of the values: finite, and cut off. `result` is the dimension in the
    result, None if it has no heads; in a tuple, that of its `index`th.
    """

    rule: Rule
    inputs: Mapping[str, int]
    result: int | None
    outputs: Mapping[str, int] = field(default_factory=dict)
    index: int | None = None

    def before(self, arguments: Arguments) -> tuple[Arguments, After]:
        given = {**self.inputs, **self.outputs}
        heads = next(arguments[name].shape[dim] for name, dim in given.items() if arguments.get(name) is not None)
        if (wanted := self.rule(heads)) == heads:
            return arguments, lambda result: result
        wide = {n: padded(arguments[n], dim, wanted) for n, dim in given.items() if arguments.get(n) is not None}

        def after(result: Any) -> Any:
            for name, dim in self.outputs.items():
                if name in wide:
                    arguments[name].copy_(wide[name].narrow(dim, 0, heads))
            if (dim := self.result) is None:
                return result
            return part_of(result, self.index, lambda x: x.narrow(dim, 0, heads))

        return {**arguments, **wide}, after
