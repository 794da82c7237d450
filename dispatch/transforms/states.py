"""Recurrent states: gathered from their slots and put back, and as `[.., K, V]` for vendors that have the key first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from k3hal.dispatch.transforms.transform import After, Arguments, part_of


def gathered_states(state: Tensor, slots: Tensor, has_state: Tensor) -> Tensor:
    """A copy [N, ...] of the states, zeros where a sequence starts."""
    return torch.where(_like(has_state & (slots != 0), state), state[slots.long()], 0.0)


def write_back(state: Tensor, new: Tensor, slots: Tensor, cu_seqlens: Tensor) -> None:
    """Put the states of sequences that have a slot and a token where they belong; all others keep their bytes."""
    live = (slots != 0) & (cu_seqlens[1:] > cu_seqlens[:-1])
    at = slots.long()
    state[at] = torch.where(_like(live, state), new.to(state.dtype), state[at])


def _like(mask: Tensor, x: Tensor) -> Tensor:
    return mask.view(-1, *[1] * (x.ndim - 1))


@dataclass(frozen=True, slots=True)
class KFirst:
    """States in arguments and result are `[.., V, K]`, as operators have them, and the function's `[.., K, V]`.

    `inputs` are given as copies; those in `written`, which the function updates in place, are copied back. `index` is
    that of the states in a result that is a tuple, None where the result has none.
    """

    inputs: tuple[str, ...]
    written: tuple[str, ...] = ()
    index: int | None = None

    def before(self, arguments: Arguments) -> tuple[Arguments, After]:
        given = {n: arguments[n] for n in (*self.inputs, *self.written) if arguments.get(n) is not None}
        turned = {name: _turned(state) for name, state in given.items()}

        def after(result: Any) -> Any:
            for name in self.written:
                if name in given:
                    given[name].copy_(turned[name].mT)
            return result if self.index is None else part_of(result, self.index, _turned)

        return {**arguments, **turned}, after


def _turned(state: Tensor) -> Tensor:
    return state.mT.contiguous()
