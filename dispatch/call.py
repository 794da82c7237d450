"""The question selection asks a provider, and its two possible answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from k3hal.dispatch.device import DeviceDescription

Phase = Literal["prefill", "decode", "verify", "any"]
PHASES: tuple[Phase, ...] = ("prefill", "decode", "verify", "any")
DimValue: TypeAlias = int | float | str | bool | None


@dataclass(frozen=True, slots=True)
class Call:
    """A class of calls of one operator: everything that is fixed when the model is built.

    `dtype` is the activation dtype (`bfloat16`, `float32`). `dims` are the operator's static facts by the names its
    contract gives them (`heads`, `head_dim`, `kv_dtype`, ...); token counts are not part of it.
    """

    op: str
    device: DeviceDescription
    dtype: str
    phase: Phase = "any"
    dims: Mapping[str, DimValue] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Yes:
    """The provider runs this class of calls; `note` may say by which path."""

    note: str = ""

    def __bool__(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class No:
    """The provider does not run this class of calls, for every reason given."""

    reasons: tuple[str, ...]

    def __init__(self, *reasons: str) -> None:
        if not reasons:
            raise ValueError("a No needs at least one reason")
        object.__setattr__(self, "reasons", reasons)

    def __bool__(self) -> bool:
        return False


Answer: TypeAlias = Yes | No
