"""Graphs of a CPU that are what a GPU's are: torch operators of a piece of work, run again over the same tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from .closure_runtime import ClosureRuntime


@dataclass
class Recorded:
    """Operators in their order: a replay runs each, and leaves what it gives where the first run left it."""

    calls: list[tuple[Any, Any, Any, Any]] = field(default_factory=list)

    def replay(self) -> None:
        with torch.inference_mode():
            for func, args, kwargs, result in self.calls:
                again = func(*args, **kwargs)
                for old, new in zip(tree_flatten(result)[0], tree_flatten(again)[0], strict=True):
                    if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.parts = [Recorded()]

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        # Views are made once, as the tensors that a GPU's graph was captured with.
        if not func.is_view:
            self.parts[-1].calls.append((func, args, kwargs or {}, result))
        return result


@dataclass
class RecordedRuntime(ClosureRuntime):
    """Also cuts graphs."""

    def capture_parts(self, work: Callable[[Callable[[], None]], None], pool: Any) -> list[Recorded]:
        assert pool == self.pools
        with _Recorder() as recorder:
            work(lambda: recorder.parts.append(Recorded()))
        # A GPU computes nothing while it captures.
        for part in recorder.parts:
            for _, args, _, result in part.calls:
                given = {t.data_ptr() for t in tree_flatten(args)[0] if isinstance(t, Tensor)}
                for made in tree_flatten(result)[0]:
                    if made.is_floating_point() and made.data_ptr() not in given:
                        made.fill_(torch.nan)
        return recorder.parts
