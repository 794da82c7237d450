"""Environment variables from several layers: the last one wins, at the place of the first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EnvDecision:
    """A variable that stands, the layer it is from, and the layers and values it overrode."""

    name: str
    value: str
    layer: str
    overrode: tuple[tuple[str, str], ...]


def settle_environment(layers: Iterable[tuple[str, Mapping[str, str]]]) -> list[EnvDecision]:
    history: dict[str, list[tuple[str, str]]] = {}
    for layer, env in layers:
        for name, value in env.items():
            history.setdefault(name, []).append((layer, value))
    return [EnvDecision(name, found[-1][1], found[-1][0], tuple(found[:-1])) for name, found in history.items()]
