"""Strategies: how a model is laid over nodes, and what each one adds whatever the model."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Literal, get_args

from k3hal.dispatch.words import nearest
from k3hal.errors import InputError, UsageError
from k3hal.plan.fields import Node
from k3hal.plan.recipe import Patch

Span = Literal["single", "multi", "pd"]
LAYOUTS = ("tp", "tep", "tp_pp", "tp_dp", "dep")
MAX_NODES = {"single": 1, "multi": 16, "pd": 16}
ROLES = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class RoleFacts:
    """One pool of a prefill/decode cluster: its HTTP port and what every launch in it gets."""

    port: int
    patch: Patch


@dataclass(frozen=True, slots=True)
class Strategy:
    """`span` says over what it extends; `layout` is one of `LAYOUTS`, or `pd`, whose roles have their own."""

    name: str
    span: Span
    layout: str
    patch: Patch = field(default_factory=Patch)
    moe_only: bool = False
    max_gpus: int | None = None
    roles: Mapping[str, RoleFacts] = field(default_factory=dict)
    router: Mapping[str, str] = field(default_factory=dict)

    @property
    def max_nodes(self) -> int:
        return MAX_NODES[self.span]


@cache
def known_strategies() -> Mapping[str, Strategy]:
    """Every strategy of `data/strategies.toml`, by name."""
    source = files("k3hal.plan") / "data" / "strategies.toml"
    root = Node(tomllib.loads(source.read_text("utf-8")), "strategies.toml")
    root.text("schema")
    return {name: _strategy(name, root.child(name)) for name in root.unused()}


def find_strategy(name: str) -> Strategy:
    """Raises `UsageError` naming the nearest strategy."""
    known = known_strategies()
    key = name.replace("-", "_")
    if key not in known:
        raise UsageError(f"--strategy: no strategy is called {name!r}", hint=nearest(key, known, always_list=True))
    return known[key]


def _strategy(name: str, node: Node) -> Strategy:
    span = node.text("span")
    if span not in get_args(Span):
        raise InputError(f"{node.where}: span is {span!r}", hint=f"expected one of {', '.join(get_args(Span))}")
    roles = {role: RoleFacts(part.whole("port"), _patch(part)) for role in ROLES if (part := node.child(role)).data}
    return Strategy(
        name,
        span,
        node.text("layout"),
        _patch(node),
        node.flag("moe_only"),
        node.whole("max_gpus", None),
        roles,
        node.strings("router"),
    )


def _patch(node: Node) -> Patch:
    return Patch(node.texts("args"), node.strings("env"))
