"""The logarithm of the sum under a softmax: to base 2 where kernels exponentiate so, to base e elsewhere."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from k3hal.dispatch.transforms.transform import After, Arguments, part_of


def to_natural(base2: Tensor) -> Tensor:
    """fp32 logarithms to base e from those to base 2; minus infinity, of no key, stays."""
    return base2.float() * math.log(2.0)


def to_base2(natural: Tensor) -> Tensor:
    """fp32 logarithms to base 2 from those to base e."""
    return natural.float() * math.log2(math.e)


@dataclass(frozen=True, slots=True)
class LseBase:
    """A function gives logarithms to `base` ("2" or "e"), the other is wanted: in its result's `index`th."""

    base: str
    index: int | None = 1

    def before(self, arguments: Arguments) -> tuple[Arguments, After]:
        change = {"2": to_natural, "e": to_base2}[self.base]

        def after(result: Any) -> Any:
            return part_of(result, self.index, change)

        return arguments, after
