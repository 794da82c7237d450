"""Counter-based random numbers keyed by (seed, tensor name), bit-identical on every platform."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

_CHUNK = 1 << 16
"""64-bit words drawn at a time; small enough to stay in cache, and no value depends on it."""

_LANES_STD = math.sqrt((2**32 - 1) / 3)
"""Standard deviation of the sum of four independent uniform 16-bit integers."""

_LANES_MEAN = 2 * (2**16 - 1)


class Stream:
    """Random values of one tensor.

    The Philox key is the first 16 bytes of SHA-256 over seed and name, so tensors are independent of each other and of
    the order in which they are made. Only integer operations and single, correctly rounded IEEE operations follow:
    no libm, no reduction whose order could vary.
    """

    def __init__(self, seed: int, name: str) -> None:
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        self._bits = np.random.Philox(key=int.from_bytes(digest[:16], "little"))

    def _words(self, count: int) -> Iterator[npt.NDArray[np.uint64]]:
        for start in range(0, count, _CHUNK):
            yield np.asarray(self._bits.random_raw(min(_CHUNK, count - start)), dtype=np.uint64)

    def octets(self, count: int) -> npt.NDArray[np.uint8]:
        """`count` uniform bytes."""
        words = list(self._words(-(-count // 8)))
        joined = np.concatenate(words) if words else np.empty(0, np.uint64)
        return joined.astype("<u8", copy=False).view(np.uint8)[:count]

    def normals(self, count: int, std: float, mean: float = 0.0) -> npt.NDArray[np.float32]:
        """`count` nearly normal float32 values: the scaled sum of four uniforms, within 3.47 standard deviations."""
        out = np.empty(count, np.float32)
        scale, shift = np.float32(std / _LANES_STD), np.float32(mean)
        low = np.uint64(0x0000FFFF0000FFFF)
        for index, words in enumerate(self._words(count)):
            pairs = (words & low) + ((words >> np.uint64(16)) & low)
            total = ((pairs & np.uint64(0xFFFFFFFF)) + (pairs >> np.uint64(32))).astype(np.int32)
            start = index * _CHUNK
            values = (total - np.int32(_LANES_MEAN)).astype(np.float32)
            values *= scale
            values += shift
            out[start : start + len(words)] = values
        return out

    def uniforms(self, count: int, low: float, high: float) -> npt.NDArray[np.float32]:
        """`count` float32 values uniform in `[low, high)`, on a grid of 2^24 steps."""
        words = list(self._words(count))
        joined = np.concatenate(words) if words else np.empty(0, np.uint64)
        steps = (joined >> np.uint64(40)).astype(np.float32)
        return steps * np.float32((high - low) * 2.0**-24) + np.float32(low)


def to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The bits of finite `values` rounded to bfloat16, ties to even."""
    bits = values.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
