"""Machines a recipe can be planned for: nodes of equal accelerators."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from k3hal.dispatch.words import nearest
from k3hal.errors import UsageError
from k3hal.plan.fields import Node


@dataclass(frozen=True, slots=True)
class Hardware:
    """One kind of node. Memory in GB (1e9 bytes); `generation` is hopper, blackwell, amd or npu."""

    id: str
    brand: str
    generation: str
    gpus: int
    node_gb: float
    nvlink_across_nodes: bool = False

    @property
    def gpu_gb(self) -> float:
        return self.node_gb / self.gpus


@cache
def known_hardware() -> Mapping[str, Hardware]:
    """Every machine of `data/hardware.toml`, by id."""
    source = files("k3hal.plan") / "data" / "hardware.toml"
    root = Node(tomllib.loads(source.read_text("utf-8")), "hardware.toml")
    root.text("schema")
    out = {}
    for key in root.unused():
        node = root.child(key)
        out[key] = Hardware(
            key,
            node.text("brand"),
            node.text("generation"),
            node.whole("gpus"),
            node.number("node_gb"),
            node.flag("nvlink_across_nodes"),
        )
    return out


def find_hardware(name: str) -> Hardware | None:
    """The machine of an id, `-` and `_` being equal; None for one that is described but in no recipe.

    Raises `UsageError` for a name that is neither.
    """
    key = name.strip().lower().replace("-", "_")
    known = known_hardware()
    if key in known:
        return known[key]
    from k3hal.dispatch.describe import described_ids

    others = set(described_ids()) - {"cpu"}
    if key in others:
        return None
    raise UsageError(
        f"--hardware: no machine is called {name!r}", hint=nearest(key, {*known, *others}, always_list=True)
    )
