"""What a decode call found in the cache rows it rewrites, without copying them ahead of every call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from k3hal.debug.capture import Site
from k3hal.debug.compact import compact

LENGTH = 16
"""Calls between two copies: more cost less, but keep more activations in memory and take longer to run again."""


class Rewriters:
    """Which site rewrote which of a layer's caches last, and whether the cache rows of a step are those of the last."""

    def __init__(self) -> None:
        self._last: dict[tuple[int | None, str], Site] = {}
        self._index: Tensor | None = None
        self._values: Tensor | None = None
        self._step, self._version = -1, 0

    def claim(self, site: Site) -> bool:
        """`site` rewrites now; whether nobody else did since it last did so."""
        mine = True
        for key in site.rewritten_caches:
            if self._last.get(key) is not site:
                self._last[key], mine = site, False
        return mine

    def forget(self) -> None:
        """Any row of any layer may have changed."""
        self._last.clear()

    def version(self, index: Tensor, step: int) -> int:
        """Changes whenever the values of `index`, which the layers of a step share, do."""
        if index is not self._index or step != self._step:
            if self._values is None or not torch.equal(self._values, index):
                self._values = index.clone()
                self._version += 1
            self._index, self._step = index, step
        return self._version


class StateTrail:
    """One copy of the rows a site rewrites, and the calls since: running those again gives the rows at any of them.

    Copying a state of many heads ahead of every call costs more than a tenth of a step. The copy is made anew after
    `LENGTH` calls, when the rows are others, and when somebody else rewrote them.
    """

    def __init__(self, site: Site, fn: Callable[..., Any], rewriters: Rewriters) -> None:
        self._site, self._fn, self._rewriters = site, fn, rewriters
        self._version = -1
        self._rows: Mapping[str, Tensor] = {}
        self._calls: list[tuple[Sequence[Any], Mapping[str, Any]]] = []
        # Layers copy in different steps: no step is slow, and memory that one gives back the next one takes.
        self._most = 1 + (site.place.layer or 0) % LENGTH

    def add(self, args: Sequence[Any], kwargs: Mapping[str, Any], step: int) -> int:
        """To be told ahead of every call of the site; the call's number for `before`."""
        index = self._site.index(args, kwargs)
        assert index is not None, "only calls that name their cache rows leave a trail"
        version = self._rewriters.version(index, step)
        mine = self._rewriters.claim(self._site)
        if not mine or version != self._version or len(self._calls) >= self._most:
            self._most = LENGTH if self._calls else self._most
            self._rows, self._version = self._site.mutated_rows(args, kwargs), version
            self._calls.clear()
        self._calls.append((args, kwargs))
        return len(self._calls) - 1

    def before(self, number: int, returned: Any) -> tuple[Mapping[str, Tensor], bool]:
        """The rows as call `number` found them, and whether the call, run again on them, returns `returned` again.

        It does not where a provider computes differently each time, or where something unseen rewrote the rows. To be
        asked before the site's next call.
        """
        if number == 0:
            return self._rows, True
        rows = {name: value.clone() for name, value in self._rows.items()}
        for args, kwargs in self._calls[:number]:
            rows, _ = self._run(args, kwargs, rows)
        _, again = self._run(*self._calls[number], rows)
        return rows, _same(again, returned)

    def _run(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], rows: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], Any]:
        """The rows after a call on `rows`, away from the live caches, and what it returns."""
        named = self._site.named(args, kwargs)
        cut = compact(self._site.op, named)
        index = cut[self._site.index_name].long()
        for name, value in rows.items():
            cache = cut[name].clone() if cut[name] is named[name] else cut[name]
            cache[index] = value
            cut[name] = cache
        returned = self._fn(**cut)
        return {name: cut[name][index] for name in rows}, returned


def _same(one: Any, other: Any) -> bool:
    pairs = zip(*(value if isinstance(value, tuple) else (value,) for value in (one, other)), strict=True)
    return all(torch.allclose(a, b, rtol=0, atol=0, equal_nan=True) for a, b in pairs if isinstance(a, Tensor))
