"""Faults of any kernel: memory it may not touch, memory it forgets, state it keeps, and the order of its threads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from k3hal.conform.faults.fault import Arguments, Catalogue, Right

MEMORY = Catalogue()
fault = MEMORY.fault
ROWWISE = ("rms_norm", "linear", "moe_experts_mxfp4", "mla_decode", "kda_decode")
"""One operator of each kind, for faults that any may have."""


def _signature(args: Arguments) -> tuple[Any, ...]:
    return tuple((tuple(v.shape), v.dtype) if isinstance(v, Tensor) else None for v in args.values())


def _main_input(args: Arguments) -> str:
    return next(name for name in ("x", "q", "qkv") if name in args)


@fault(*ROWWISE)
def stale_graph_inputs(right: Right, args: Arguments) -> Any:
    """A captured graph is replayed on the inputs it was captured with: new ones are not copied in."""
    name = _main_input(args)
    static = right.memory.setdefault(("static", _signature(args)), args[name].clone())
    return right(args, **{name: static})


@fault(*ROWWISE)
def race(right: Right, args: Arguments) -> Any:
    """A missing barrier: once in a while a row is read before it is written."""
    out = right(args)
    if right.calls % 3 == 0 and out.shape[0]:
        out[-1] = 0
    return out


@fault("linear", "mla_decode")
def atomic_order(right: Right, args: Arguments) -> Any:
    """Parts are added with atomics, in whatever order they come, by a provider that calls itself deterministic."""
    out = right(args)
    step = torch.rand(out.shape, generator=right.memory.setdefault("order", torch.Generator().manual_seed(3)))
    return (
        (out.float() * (1 + (step - 0.5) * 2**-7)).to(out.dtype) if out.dtype is torch.bfloat16 else out + step * 1e-7
    )


@fault(*ROWWISE)
def second_call_differs(right: Right, args: Arguments) -> Any:
    """An accumulator in module state is not cleared: the second call adds to the first."""
    out = right(args)
    key = ("sum", tuple(out.shape), out.dtype)
    right.memory[key] = right.memory.get(key, 0) + out.float()
    return right.memory[key].to(out.dtype)


@fault(*ROWWISE)
def input_modified(right: Right, args: Arguments) -> Any:
    """The input serves as scratch memory."""
    out = right(args)
    args[_main_input(args)].mul_(2)
    return out


@fault("rms_norm", "sigmoid_gate", "linear")
def output_in_the_input(right: Right, args: Arguments) -> Any:
    """The result is written over the input and returned."""
    out, x = right(args), args[_main_input(args)]
    return x.copy_(out) if x.shape == out.shape else x.as_strided(out.shape, out.stride()) if not out.numel() else out


@fault("sigmoid_gate", "rms_norm", "embed")
def result_of_the_last_call_overwritten(right: Right, args: Arguments) -> Any:
    """The result lies in a workspace that the next call writes to."""
    out = right(args)
    space = right.memory.setdefault(("space", tuple(out.shape), out.dtype), torch.zeros_like(out))
    return space.copy_(out)


@fault(*ROWWISE)
def uninitialised_accumulator(right: Right, args: Arguments) -> Any:
    """The accumulator comes from the allocator and is not cleared."""
    out = right(args)
    total = torch.empty_like(out)
    return total.add_(out)


@fault("rms_norm", "linear", "situ_and_mul", "embed")
def written_past_the_end(right: Right, args: Arguments) -> Any:
    """A vector store runs past the end of a row argument."""
    out, tensor = right(args), args["weight" if "weight" in args else "x"]
    if tensor.numel():
        size = tensor.untyped_storage().nbytes() // tensor.element_size()
        end = tensor.storage_offset() + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        if end < size:
            tensor.as_strided((1,), (1,), end).zero_()
    return out


@fault("linear", "rms_norm", "moe_experts_mxfp4")
def transposed_result(right: Right, args: Arguments) -> Any:
    """The result comes column-major: right values, wrong for every reader of its memory, so also in shape."""
    return right(args).mT


@fault("linear", "rms_norm", "mla_decode")
def result_in_fp32(right: Right, args: Arguments) -> Any:
    """The result is not cast to the activation dtype."""
    return right(args).float().double() if args[_main_input(args)].dtype is torch.float32 else right(args).float()


@fault("mla_decode", "linear", "rms_norm")
def raises_for_no_rows(right: Right, args: Arguments) -> Any:
    """A grid of zero blocks cannot be launched, and nobody asks before."""
    work = args.get("seq_lens", args[_main_input(args)])
    if work.numel() == 0 or not bool(work.count_nonzero()):
        raise RuntimeError("invalid configuration argument")
    return right(args)


LARGE = 2**31


def _wrapped(index: Tensor, arena: Tensor) -> Tensor:
    """The row that a byte offset taken modulo 2^31 leads to."""
    stride = arena.stride(0) * arena.element_size()
    return torch.where(index >= 0, index * stride % LARGE // stride, index)


@fault("copy_pages", first="far")
def offset_in_32_bits(right: Right, args: Arguments) -> Any:
    """page * page bytes is taken in 32 bits."""
    return right(args, src=_wrapped(args["src"], args["arena"]))


@fault("mla_decode", "mla_prefill", first="far")
def page_offset_in_32_bits(right: Right, args: Arguments) -> Any:
    """page * page stride is taken in 32 bits."""
    last = args["kv_cache"].shape[0] - 1
    table = args["page_table"].long()
    wrapped = torch.where(table <= last, _wrapped(table.clamp_max(last), args["kv_cache"]), table)
    return right(args, page_table=wrapped.int())


@fault("mla_cache_insert", first="far")
def row_offset_in_32_bits(right: Right, args: Arguments) -> Any:
    """row * entry is taken in 32 bits."""
    page = args["kv_cache"].shape[1]
    rows = args["rows"]
    wrapped = _wrapped(rows // page, args["kv_cache"]) * page + rows % page
    return right(args, rows=torch.where(rows >= 0, wrapped, rows))


@fault("kda_recurrent", "kda_decode", "kda_chunk", "kda_prefill", first="far")
def slot_offset_in_32_bits(right: Right, args: Arguments) -> Any:
    """slot * slot stride is taken in 32 bits."""
    return right(args, slots=_wrapped(args["slots"].long(), args["state"]).int())
