"""Going back to before an engine's last step: one copy of the state slots, and the steps since."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from k3hal.debug.memory import same_bytes
from k3hal.dispatch.observe import Step, repeating

LENGTH = 16
"""Steps that one copy serves: more cost less, but take longer to run again."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class StepTrail:
    """Keeps what it takes to repeat the last step, at the price of a copy every `LENGTH` steps of decoding.

    A trail is a step and the pure decode steps after it over the same sequences. Its copy holds the state slots that
    its first step reads; the others it begins itself. Whatever else a step reads, the latents of its sequences, stays
    where it is until pages move or sequences change, and then a new trail begins.
    """

    def __init__(self) -> None:
        self._steps: list[Step] = []
        self._complete = True
        self._buffer: Tensor | None = None
        self._held = torch.zeros(0, dtype=torch.int64)

    def add(self, step: Step) -> None:
        """To be told ahead of every step."""
        if not self._complete or not self._continues(step):
            self._steps.clear()
            self._copy(step)
        self._steps.append(step)
        self._complete = False

    def done(self) -> None:
        """To be told once the step has run: the states after one that failed are nobody's."""
        self._complete = True

    @contextmanager
    def rewound(self) -> Iterator[SavedCaches]:
        """Within, the caches are as the last step found them; afterwards they are as now again.

        To be entered before the next step. Gives what the caches hold now.
        """
        *earlier, last = self._steps
        saved = SavedCaches(self._steps)
        try:
            with repeating():
                if len(self._held):
                    last.states[self._held] = self._rows(last)
                for step in earlier:
                    step.run()
                yield saved
        finally:
            saved.put_back()

    def _continues(self, step: Step) -> bool:
        if not self._steps or len(self._steps) == LENGTH or step.moved or step.num_decodes != len(step.slots):
            return False
        last = self._steps[-1]
        grown = last.context_lens + last.new_lens
        return (
            step.states is last.states
            and np.array_equal(step.slots, last.slots)
            and np.array_equal(step.context_lens, grown)
        )

    def _copy(self, step: Step) -> None:
        self._held = _index(step.slots[step.context_lens > 0], step.states.device)
        torch.index_select(step.states, 0, self._held, out=self._rows(step))

    def _rows(self, step: Step) -> Tensor:
        """Memory for the held slots, kept from copy to copy: fresh memory would cost more than the copy."""
        count, width = len(self._held), step.states.shape[1]
        buffer = self._buffer
        if buffer is None or len(buffer) < count or buffer.shape[1] != width or buffer.device != step.states.device:
            buffer = self._buffer = step.states.new_empty(count, width)
        return buffer[:count]


class SavedCaches:
    """Copies of all that a run of steps over the same sequences writes: their state slots, and latents."""

    def __init__(self, steps: list[Step]) -> None:
        last = steps[-1]
        rows = torch.cat([step.kv_rows for step in steps])
        rows = rows[rows >= 0]
        places: list[tuple[Tensor, tuple[Tensor, ...]]] = [
            (cache, (rows // cache.shape[1], rows % cache.shape[1])) for cache in map(_bits, last.kv)
        ]
        places.append((last.states, (_index(last.slots, last.states.device),)))
        self._saved = [(cache, index, cache[index]) for cache, index in places]

    def put_back(self) -> None:
        for cache, index, values in self._saved:
            cache[index] = values

    def hold_still(self) -> bool:
        """Whether the caches hold, bit by bit, what they held when this was made."""
        return all(same_bytes(cache[index], values) for cache, index, values in self._saved)


def _bits(value: Tensor) -> Tensor:
    """The same memory as integers, which every device can index."""
    return value.view(_BITS[value.dtype.itemsize])


def _index(slots: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(slots).to(device, torch.int64)
