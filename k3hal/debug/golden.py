"""What an operator should give for a case: its reference on the same inputs, in fp64 inside."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from k3hal.debug.memory import GuardedCopy
from k3hal.dispatch.operator import Operator


class WiderFloats(TorchFunctionMode):
    """While active, what asks for float32 gets float64, and products of both are taken in float64.

    A reference rounds where its contract says so, by casting to the activation dtype; that stays.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.float:
            return args[0].double()
        if func is Tensor.to:
            args = tuple(torch.float64 if value is torch.float32 else value for value in args)
        if kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        if func in _PRODUCTS:
            args = _widened(args)
        elif func is Tensor.__setitem__ and isinstance(args[2], Tensor):
            args = (*args[:2], args[2].to(args[0].dtype))
        return func(*args, **kwargs)


_PRODUCTS: frozenset[Callable[..., Any]] = frozenset(
    {torch.matmul, torch.bmm, torch.einsum, torch.nn.functional.linear, Tensor.matmul, Tensor.__matmul__, Tensor.bmm}
)


def _widened(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The factors in float64 if any is."""
    if not any(isinstance(value, Tensor) and value.dtype is torch.float64 for value in args):
        return args
    return tuple(v.double() if isinstance(v, Tensor) and v.dtype.is_floating_point else v for v in args)


def golden(operator: Operator, args: Mapping[str, Any]) -> dict[str, Tensor]:
    """Outputs by name from the reference, computed in fp64 where it asks for fp32. `args` are left alone."""
    copy = GuardedCopy(args)
    with torch.inference_mode(), WiderFloats():
        returned = operator.reference(**copy.args)
    outputs = named_outputs(operator, returned, copy.args)
    # An exact output's range is that of its own dtype: what overflows float32 must do so here.
    narrow = {n for n, v in outputs.items() if operator.outputs[n] == "exact" and v.dtype is torch.float64}
    return {name: value.float() if name in narrow else value for name, value in outputs.items()}


def named_outputs(operator: Operator, returned: Any, args: Mapping[str, Any]) -> dict[str, Tensor]:
    """Everything a call produced by its name in `Operator.outputs`: returned tensors first, then mutated arguments.

    Raises `ValueError` for a call that returned another number of values, or something that is no tensor.
    """
    values = () if returned is None else returned if isinstance(returned, tuple) else (returned,)
    wanted = len(operator.outputs) - len(operator.mutates)
    if len(values) != wanted:
        raise ValueError(f"returned {len(values)} values, the contract has {wanted}")
    for name, value in zip(operator.outputs, values, strict=False):
        if value is not None and not isinstance(value, Tensor):
            raise ValueError(f"returned {type(value).__name__} for {name}, not a tensor")
    named = dict(zip(operator.outputs, (*values, *(args[name] for name in operator.mutates)), strict=True))
    return {name: value for name, value in named.items() if value is not None}
