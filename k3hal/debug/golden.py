"""What an operator should give for a case: its reference on the same inputs, in fp64 inside."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from k3hal.debug.memory import GuardedCopy
from k3hal.dispatch.operator import Operator


class Golden(dict[str, Tensor]):
    """Outputs by name. `dtypes` are those the contract gives them, which the values may be wider than."""

    def __init__(self, values: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype]) -> None:
        super().__init__(values)
        self.dtypes = dict(dtypes)


class WiderFloats(TorchFunctionMode):
    """While active, what asks for float32 gets float64, and products of both are taken in float64.

    A reference rounds where its contract says so, by casting to the activation dtype; that stays. `before_rounding`
    knows what such a tensor was before its last rounding, through stores into a buffer, `where` and a sum.
    """

    def __init__(self) -> None:
        super().__init__()
        self._wide: dict[int, tuple[Tensor, Tensor]] = {}

    def before_rounding(self, tensor: Tensor) -> Tensor | None:
        """The fp64 values that `tensor` was rounded from; None where unknown."""
        # The rounded tensor is kept beside them, so that its id is nobody else's.
        found = self._wide.get(id(tensor))
        return found[1] if found else None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__setitem__ and isinstance(args[2], Tensor):
            self._store(*args)
        out = self._run(func, args, kwargs)
        if isinstance(out, Tensor) and out.dtype in _ROUNDED and (wide := self._exact(func, args)) is not None:
            self._wide[id(out)] = (out, wide)
        return out

    def _exact(self, func: Any, args: Any) -> Tensor | None:
        """The result of a call that rounds, or selects among rounded values, before the rounding."""
        if func is Tensor.to and args[0].dtype is torch.float64:
            return args[0]
        if func is torch.where and len(args) == 3 and (wide := self.before_rounding(args[1])) is not None:
            return torch.where(args[0], wide, args[2].double())
        if func in _SUMS and isinstance(args[1], Tensor):
            return args[0].double() + args[1].double()
        return None

    def _store(self, buffer: Tensor, index: Any, value: Tensor) -> None:
        if buffer.dtype not in _ROUNDED:
            return
        wide, known = self.before_rounding(value), self.before_rounding(buffer)
        if wide is not None or known is not None:
            known = buffer.double() if known is None else known
            known[index] = value.double() if wide is None else wide
            self._wide[id(buffer)] = (buffer, known)

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
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


_ROUNDED = (torch.bfloat16, torch.float16)
_SUMS = (torch.add, Tensor.add, Tensor.__add__)
_PRODUCTS: frozenset[Callable[..., Any]] = frozenset(
    {torch.matmul, torch.bmm, torch.einsum, torch.nn.functional.linear, Tensor.matmul, Tensor.__matmul__, Tensor.bmm}
)


def _widened(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The factors in float64 if any is."""
    if not any(isinstance(value, Tensor) and value.dtype is torch.float64 for value in args):
        return args
    return tuple(v.double() if isinstance(v, Tensor) and v.dtype.is_floating_point else v for v in args)


def golden(operator: Operator, args: Mapping[str, Any], device: str = "cpu") -> Golden:
    """Outputs by name from the reference, computed in fp64 where it asks for fp32, on a torch device. `args` are left
    alone.

    An output in a narrow dtype is given as it is before its last rounding, which is then part of a provider's error:
    two roundings in a row are judged as what they are, and not by where a rounded golden happens to fall.
    """
    copy = GuardedCopy(args, device)
    wider = WiderFloats()
    with torch.inference_mode(), wider:
        returned = operator.reference(**copy.args)
    outputs = named_outputs(operator, returned, copy.args)
    dtypes = {n: torch.float32 if v.dtype is torch.float64 else v.dtype for n, v in outputs.items()}
    values = {}
    for name, value in outputs.items():
        # An exact output's range is that of its own dtype: what overflows float32 must do so here.
        exact = value.float() if value.dtype is torch.float64 else value
        wide = wider.before_rounding(value)
        values[name] = exact if operator.outputs[name] == "exact" else value if wide is None else wide
    return Golden(values, dtypes)


def named_outputs(operator: Operator, returned: Any, args: Mapping[str, Any]) -> dict[str, Tensor]:
    """Everything a call produced by its name in `Operator.outputs`: returned tensors first, then mutated arguments.

    A contract returns nothing, one tensor, or a tuple of two and more, of which some may be None. Raises `ValueError`
    for a call that returned another structure, something that is no tensor, or a tensor that requires grad.
    """
    values = () if returned is None else returned if isinstance(returned, tuple) else (returned,)
    wanted = len(operator.outputs) - len(operator.mutates)
    if len(values) != wanted:
        raise ValueError(f"returned {len(values)} values, the contract has {wanted}")
    if isinstance(returned, tuple) and (wanted < 2 or type(returned) is not tuple):
        has = ("nothing", "the tensor itself")[wanted] if wanted < 2 else "a plain tuple"
        raise ValueError(f"returned a {type(returned).__name__} of {wanted}, the contract has {has}")
    for name, value in zip(operator.outputs, values, strict=False):
        if value is not None and not isinstance(value, Tensor):
            raise ValueError(f"returned {type(value).__name__} for {name}, not a tensor")
    named = dict(zip(operator.outputs, (*values, *(args[name] for name in operator.mutates)), strict=True))
    outputs = {name: value for name, value in named.items() if value is not None}
    for name, value in outputs.items():
        if value.requires_grad:
            raise ValueError(f"{name} requires grad")
    return outputs
