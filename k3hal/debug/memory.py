"""Copies of arguments that keep strides, offsets and shared memory, and that notice every write where none may be."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

MARGIN = 256
"""Bytes of canary on either side of a block, a multiple of every alignment kept."""
ALIGNMENT = 64
_CANARY = 0xFF


@dataclass(slots=True)
class _Block:
    """One copied stretch of memory: `buffer` u8 with margins, `start` where the copy begins in it, its contents
    `before` the call, and the arguments that lie in it."""

    buffer: Tensor
    start: int
    length: int
    before: Tensor
    names: list[str] = field(default_factory=list)


def storage_bytes(tensor: Tensor) -> Tensor:
    """The whole storage a tensor lies in, as u8."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def byte_span(tensor: Tensor) -> tuple[int, int]:
    """First and last + 1 byte of a tensor within its storage."""
    size, first = tensor.element_size(), int(tensor.storage_offset())
    last = first + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return first * size, (last + 1) * size


def place(buffer: Tensor, byte_offset: int, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int]) -> Tensor:
    """A tensor at a byte of `buffer`'s storage; the byte is a multiple of the element size."""
    out = torch.empty(0, dtype=dtype, device=buffer.device)
    return out.set_(buffer.untyped_storage(), byte_offset // dtype.itemsize, tuple(shape), tuple(strides))


def view_of(buffer: Tensor, like: Tensor, byte_offset: int) -> Tensor:
    """The tensor of `like`'s dtype, shape and strides at a byte of `buffer`'s storage."""
    return place(buffer, byte_offset, like.dtype, like.shape, like.stride())


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Equality of values under which a NaN equals itself; False for other shapes or dtypes."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8)


class GuardedCopy:
    """A copy of a call's arguments on a device.

    Tensors that share memory share it in the copy, at the same distances and the same alignment. Every block of
    memory has canary margins; bytes between the rows of strided tensors are copied along and guarded as well.
    """

    def __init__(self, args: Mapping[str, Any], device: str | torch.device = "cpu") -> None:
        self.args: dict[str, Any] = dict(args)
        self.device = torch.device(device)
        self._blocks: list[_Block] = []
        groups: dict[int, list[str]] = {}
        for name, value in args.items():
            if isinstance(value, Tensor):
                if value.numel():
                    groups.setdefault(value.untyped_storage().data_ptr(), []).append(name)
                else:
                    self.args[name] = torch.empty_strided(
                        value.shape, value.stride(), dtype=value.dtype, device=self.device
                    )
        for names in groups.values():
            self._copy_group(names, args, self.device)

    def _copy_group(self, names: list[str], args: Mapping[str, Tensor], device: torch.device) -> None:
        spans = {name: byte_span(args[name]) for name in names}
        low, high = min(first for first, _ in spans.values()), max(last for _, last in spans.values())
        source = storage_bytes(args[names[0]])[low:high]
        start = MARGIN + (args[names[0]].untyped_storage().data_ptr() + low) % ALIGNMENT
        buffer = torch.full((start + high - low + MARGIN,), _CANARY, dtype=torch.uint8, device=device)
        buffer[start : start + high - low].copy_(source)
        for name in names:
            self.args[name] = view_of(buffer, args[name], start + spans[name][0] - low)
        self._blocks.append(_Block(buffer, start, high - low, buffer.clone(), names))

    def problems(self, mutable: Collection[str]) -> list[str]:
        """What was written that may not be: an argument that is not `mutable`, a margin, the gap between rows."""
        found = []
        for block in self._blocks:
            now = block.buffer.clone()
            for name in set(block.names) & set(mutable):
                copy = self.args[name]
                offset = copy.storage_offset() * copy.element_size()
                view_of(now, copy, offset).copy_(view_of(block.before, copy, offset))
            if not torch.equal(now, block.before):
                found += self._locate(block, now, mutable)
        return found

    def _locate(self, block: _Block, now: Tensor, mutable: Collection[str]) -> list[str]:
        where, end = "/".join(block.names), block.start + block.length
        found = []
        for name in sorted(set(block.names) - set(mutable)):
            copy = self.args[name]
            offset = copy.storage_offset() * copy.element_size()
            if not same_bytes(view_of(now, copy, offset), view_of(block.before, copy, offset)):
                found.append(f"argument {name} was modified")
        changed = now != block.before
        for part, side in ((changed[: block.start], "before"), (changed[end:], "after")):
            if bool(part.any()):
                found.append(f"{int(part.sum())} bytes just {side} {where} were written")
        if not found:
            found.append(f"{int(changed.sum())} bytes between the rows of {where} were written")
        return found

    def alias_of(self, tensor: Tensor) -> str | None:
        """The argument whose memory a tensor lies in."""
        if not tensor.numel():
            return None
        pointer = tensor.untyped_storage().data_ptr()
        for block in self._blocks:
            if block.buffer.untyped_storage().data_ptr() == pointer:
                return block.names[0]
        return None


class PoisonedEmpty(TorchFunctionMode):
    """While active, memory that Python code gets uninitialised from torch is NaN, or an integer dtype's largest value.

    What a compiled library allocates inside is out of reach. (A dispatch mode would see some of that too, but loads
    the compiler, seconds for every process.)
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _UNINITIALISED and isinstance(out, Tensor):
            poison(out)
        return out


_UNINITIALISED = frozenset(
    {
        torch.empty,
        torch.empty_like,
        torch.empty_strided,
        torch.empty_permuted,
        Tensor.new_empty,
        Tensor.new_empty_strided,
    }
)


def poison(tensor: Tensor) -> None:
    """Fill in place with NaN, the largest integer, or True."""
    if tensor.dtype.is_floating_point:
        if tensor.element_size() == 1:
            tensor.view(torch.uint8).fill_(0xFF)
        else:
            tensor.fill_(torch.nan)
    elif tensor.dtype.is_complex:
        tensor.fill_(complex(torch.nan, torch.nan))
    else:
        tensor.fill_(True if tensor.dtype is torch.bool else torch.iinfo(tensor.dtype).max)
