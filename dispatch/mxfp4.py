"""How MXFP4 weights reach the arithmetic: what a provider declares, what a call gets, and why not a better way."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from k3hal.dispatch.call import Call

if TYPE_CHECKING:
    from k3hal.dispatch.provider import Provider
    from k3hal.dispatch.select import Consideration

Mxfp4Path = Literal["native", "w4a16", "dequantised"]
PATHS: tuple[Mxfp4Path, ...] = get_args(Mxfp4Path)
"""`native`: MX tensor cores multiply the codes. `w4a16`: codes stay packed in memory and are decoded inside the call.
`dequantised`: plain weights are made ahead of the product and kept or written out."""
Declared: TypeAlias = "Mxfp4Path | Callable[[Call], Mxfp4Path]"
FEATURE = "mxfp4_native"
"""The feature of a machine with MX tensor cores."""
TEXT = {
    "native": "native MX tensor cores",
    "w4a16": "W4A16, codes decoded inside the call",
    "dequantised": "weights dequantised ahead of the product",
}


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """The path a call takes: `path` is None where the provider does not say. `why` are the reasons, in words."""

    path: Mxfp4Path | None
    why: tuple[str, ...]


def is_mxfp4(call: Call) -> bool:
    """Whether a call's weights are MXFP4."""
    return call.op.endswith(("_mxfp4", "_a8w4")) or call.dims.get("expert_format") == "mxfp4"


def declared_path(provider: Provider, call: Call) -> Mxfp4Path | None:
    """What a provider says of a class of calls; None where it says nothing."""
    return provider.mxfp4(call) if callable(provider.mxfp4) else provider.mxfp4


def path_of(call: Call, chosen: Provider | None, others: Iterable[tuple[Provider, Consideration]]) -> Mxfp4:
    """The path of a call that `chosen` runs (None: the reference), beside what every provider answered."""
    if chosen is None:
        path: Mxfp4Path | None = "dequantised"
        why = ["the reference dequantises every expert that is chosen, then multiplies in fp32"]
    else:
        path = declared_path(chosen, call)
        why = [f"{chosen.id} declares it" if path else f"{chosen.id} does not declare its path"]
    if path != "native":
        why += _why_not_native(call, others)
    return Mxfp4(path, tuple(why))


def _why_not_native(call: Call, others: Iterable[tuple[Provider, Consideration]]) -> list[str]:
    machine = "has" if FEATURE in call.device.features else "has no"
    why = [f"{call.device.id} {machine} MX tensor cores ({FEATURE})"]
    native = [(p, line) for p, line in others if declared_path(p, call) == "native"]
    if not native:
        return [*why, "no provider of this operator declares the native path"]
    return [*why, *(f"{p.id} is native: {'; '.join(c.reasons) or 'says Yes, and stands behind'}" for p, c in native)]
