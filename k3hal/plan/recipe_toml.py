"""Reads a recipe in this package's own schema, `k3hal.recipe/1`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from k3hal.errors import InputError
from k3hal.plan.fields import Node
from k3hal.plan.recipe import Feature, On, Patch, Recipe, RoleRules, StrategyRules, Variant
from k3hal.plan.strategies import LAYOUTS, ROLES

SCHEMA = "k3hal.recipe/1"
_PATCH = ("args", "env", "image")


@cache
def builtin_recipe() -> Recipe:
    """The recipe of Kimi K3 that comes with this package."""
    return read_toml((files("k3hal.plan") / "data" / "kimi_k3.toml").read_text("utf-8"), "kimi_k3.toml")


def about_kimi_k3(recipe: Recipe) -> bool:
    """Whether a recipe is for the model whose config comes with this package."""
    return recipe.model_id == builtin_recipe().model_id


def read_toml(text: str, where: str) -> Recipe:
    """Raises `InputError`, one line naming the file and the key."""
    try:
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InputError(f"{where}: not TOML: {error}") from error
    root = Node(data, where)
    if (schema := root.text("schema")) != SCHEMA:
        raise InputError(f"{where}: schema is {schema!r}", hint=f"expected {SCHEMA!r}")
    model_id = root.text("model_id")
    recipe = Recipe(
        id=root.text("id"),
        source=where,
        model_id=model_id,
        architecture=root.text("architecture"),
        context_length=root.whole("context_length"),
        default_strategy=root.text("default_strategy"),
        default_hardware=root.text("default_hardware", None),
        verified=frozenset(root.texts("verified")),
        base=patch_of(root),
        variants={name: _variant(name, node, model_id) for name, node in root.children("variants")},
        features={name: _feature(name, node) for name, node in root.children("features")},
        strategies={name: _rules(node) for name, node in root.children("strategies")},
        baseline=_on(root, "hardware"),
        min_gpus=min_gpus_of(root.child("min_gpus")),
        image=root.text("image", None),
    )
    if unused := root.unused():
        raise InputError(f"{where}: unknown key {unused[0]!r}")
    return recipe


def patch_of(node: Node) -> Patch:
    return Patch(node.texts("args"), node.environment("env"), node.text("image", None))


def min_gpus_of(node: Node) -> Mapping[str, int | Mapping[str, int]]:
    """Fewest accelerators by machine: one number, or numbers by strategy."""
    out: dict[str, Any] = {}
    for key, value in node.data.items():
        if isinstance(value, Mapping):
            inner = node.child(key)
            out[key] = {name: inner.whole(name) for name in inner.data}
        else:
            out[key] = node.whole(key)
    return out


def _on(node: Node, key: str) -> On:
    out = {}
    for name, part in node.children(key):
        part.refuse_unknown(_PATCH)
        out[name] = patch_of(part)
    return out


def _variant(name: str, node: Node, model_id: str) -> Variant:
    node.refuse_unknown((*_PATCH, "model_id", "precision", "memory_gb", "hardware", "on", "tp"))
    return Variant(
        name,
        node.text("model_id", model_id),
        node.text("precision"),
        node.number("memory_gb"),
        node.texts("hardware"),
        patch_of(node),
        _on(node, "on"),
        node.whole("tp", None),
    )


def _feature(name: str, node: Node) -> Feature:
    node.refuse_unknown(("args", "env", "on", "strategies", "reason", "opt_in", "excludes"))
    return Feature(
        name,
        node.texts("args"),
        node.environment("env"),
        _on(node, "on"),
        node.texts("strategies", None),
        node.text("reason", ""),
        node.flag("opt_in"),
        node.texts("excludes"),
    )


def _rules(node: Node) -> StrategyRules:
    node.refuse_unknown((*_PATCH, "listed", "support", "min_gpus", "tp", "extra_env", "on", "router", *ROLES))
    support = node.child("support")
    return StrategyRules(
        node.flag("listed"),
        {key: support.flag(key) for key in support.data},
        node.whole("min_gpus", None),
        node.whole("tp", None),
        patch_of(node),
        node.environment("extra_env"),
        _on(node, "on"),
        {role: _role(part) for role in ROLES if (part := node.child(role)).data},
        node.strings("router"),
    )


def _role(node: Node) -> RoleRules:
    node.refuse_unknown((*_PATCH, "layout", "tp", "on"))
    return RoleRules(layout_of(node, "layout"), node.whole("tp", None), patch_of(node), _on(node, "on"))


def layout_of(node: Node, key: str) -> str:
    """A role's layout. Raises `InputError` for one a pool cannot have."""
    layout = node.text(key, "tp")
    if layout not in LAYOUTS or layout in ("tp_pp", "tp_dp"):
        raise InputError(f"{node.where}: {key} is {layout!r}", hint="a pool is tp, tep or dep")
    return layout
