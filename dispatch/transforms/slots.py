"""The slot of no sequence: 0 for operators, -1 or none at all for some vendors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from k3hal.dispatch.transforms.transform import After, Arguments


@dataclass(frozen=True, slots=True)
class NullSlot:
    """Slot numbers in the argument `slots`: the operator's null slot 0 becomes the vendor's, which is `to`."""

    slots: str
    to: int = -1

    def before(self, arguments: Arguments) -> tuple[Arguments, After]:
        slots = arguments[self.slots]
        return {**arguments, self.slots: torch.where(slots == 0, self.to, slots)}, lambda result: result


@dataclass(frozen=True, slots=True)
class KeptNullSlot:
    """A vendor without a null slot writes slot 0 as any other: its bytes in the `pools` are kept over the call."""

    pools: tuple[str, ...]

    def before(self, arguments: Arguments) -> tuple[Arguments, After]:
        kept = {name: arguments[name][0].clone() for name in self.pools}

        def after(result: Any) -> Any:
            for name, bytes_ in kept.items():
                arguments[name][0] = bytes_
            return result

        return arguments, after
