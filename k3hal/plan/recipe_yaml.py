"""Reads a published recipe file (the schema of the vLLM recipes) into the same record."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from k3hal.errors import InputError
from k3hal.plan.fields import Node
from k3hal.plan.hardware import known_hardware
from k3hal.plan.recipe import Feature, On, Patch, Recipe, RoleRules, StrategyRules, Variant
from k3hal.plan.recipe_toml import layout_of, min_gpus_of, read_toml
from k3hal.plan.strategies import ROLES, known_strategies

_VERDICTS = {"supported": True, "unsupported": False}
_MAX_BYTES = 1_000_000
_UNLIMITED_CONTEXT = 10**9


def read_recipe(path: Path) -> Recipe:
    """A recipe file: `.toml` in this package's schema, anything else as a published YAML recipe."""
    return recipe_of(path, read_text(path, "a recipe"))


def recipe_of(path: Path, text: str) -> Recipe:
    """The recipe of a file's text."""
    return read_toml(text, str(path)) if path.suffix == ".toml" else read_yaml(text, str(path))


def read_yaml(text: str, where: str) -> Recipe:
    """Raises `InputError`, one line naming the file and the key."""
    root = Node(load_yaml(text, where), where)
    model, overrides = root.child("model"), root.child("strategy_overrides")
    model_id = model.text("model_id")
    opt_in = set(root.texts("opt_in_features"))
    bars = root.child("strategy_min_gpus")
    meta = root.child("meta")
    return Recipe(
        id=meta.text("slug", model_id),
        source=where,
        model_id=model_id,
        architecture=model.text("architecture", "dense"),
        context_length=model.whole("context_length", _UNLIMITED_CONTEXT),
        default_strategy=root.text("default_strategy", "single_node_tp"),
        default_hardware=meta.text("default_hardware", None),
        verified=frozenset(name for name, word in meta.child("hardware").data.items() if word == "verified"),
        base=Patch(model.texts("base_args"), model.environment("base_env"), model.text("docker_image", None)),
        variants={name: _variant(name, node, model_id) for name, node in root.children("variants")},
        features={name: _feature(name, node, name in opt_in) for name, node in root.children("features")},
        strategies={
            name: _rules(name, root, bars, overrides.child(name))
            for name in {**known_strategies(), **overrides.data, **root.child("strategy_hardware").data}
        },
        baseline=_on(root, "hardware_overrides"),
        min_gpus=_hardware_bars(bars),
        image=model.text("docker_image", None),
        nightly=model.flag("nightly_required") or "nightly" in str(model.raw("min_vllm_version")),
        unused=_unused(root),
    )


def load_yaml(text: str, where: str) -> Any:
    """The document of a YAML text. Raises `InputError` where it is none."""
    try:
        return yaml.load(text, Loader=_loader())
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InputError(f"{where}: not YAML: {' '.join(str(error).split())[:200]}") from error


def _loader() -> Any:
    """YAML's safe types, and no key twice in a mapping: the first would be lost without a word."""

    base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

    class Loader(base):
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            seen = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode) and key.value in seen and key.value != "<<":
                    raise yaml.YAMLError(f"key {key.value!r} twice, line {key.start_mark.line + 1}")
                seen.add(key.value if isinstance(key, yaml.ScalarNode) else id(key))
            return super().construct_mapping(node, deep)

    return Loader


def read_text(path: Path, what: str) -> str:
    """A small file of a user's. Raises `InputError`, one line naming it and `what` it should be."""
    try:
        with path.open("rb") as file:  # read once, and no further: a pipe has no size, and a device no end
            data = file.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise InputError(f"{path}: too large for {what}", hint=f"at most {_MAX_BYTES} bytes")
        return data.decode("utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 at byte {error.start}") from error


def _unused(root: Node) -> tuple[str, ...]:
    """Keys that say something and are not planned with; prose and install notes are none."""
    for key in ("guide", "dependencies", "compatible_strategies"):
        root.raw(key)
    for key in ("min_vllm_version", "install", "parameter_count", "active_parameters"):
        root.child("model").raw(key)
    for key in ("meta", "strategy_min_gpus"):
        root.child(key).take_all()
    root.child("meta").child("hardware").take_all()
    for group in ("variants", "features"):
        for _, node in root.children(group):
            for key in ("description", "label"):
                node.raw(key)
    return tuple(root.unused_below())


def _on(node: Node, key: str) -> On:
    return {
        name: Patch(
            (*part.texts("extra_args"), *part.texts("vllm_args"), *part.texts("args")),
            part.environment("extra_env") | part.environment("env"),
            part.text("docker_image", None),
        )
        for name, part in node.children(key)
    }


def _variant(name: str, node: Node, model_id: str) -> Variant:
    return Variant(
        name,
        node.text("model_id", model_id),
        node.text("precision", "bf16"),
        node.number("vram_minimum_gb"),
        node.texts("supported_hardware", tuple(known_hardware())),
        Patch(node.texts("extra_args"), node.environment("extra_env"), node.text("docker_image", None)),
        _on(node, "hardware_overrides"),
        node.whole("tp", None),
    )


def _feature(name: str, node: Node, opt_in: bool) -> Feature:
    excludes = _exclusive_words(node.text("description", ""))
    return Feature(
        name,
        node.texts("args"),
        node.environment("env"),
        _on(node, "hardware_overrides"),
        node.texts("strategies", None),
        "",
        opt_in,
        excludes,
    )


def _exclusive_words(description: str) -> tuple[str, ...]:
    """Features that a description calls mutually exclusive: the schema has no field for it."""
    _, found, rest = description.lower().partition("mutually exclusive with ")
    return (rest.split()[0].strip(".,;`"),) if found and rest.split() else ()


def _rules(name: str, root: Node, bars: Node, node: Node) -> StrategyRules:
    support = root.child("strategy_hardware").child(name)
    bar = bars.raw(name)
    extra = node.environment("extra_env")
    return StrategyRules(
        name in root.texts("compatible_strategies"),
        {key: _verdict(support, key) for key in support.data},
        bars.whole(name) if bar is not None else None,
        node.whole("tp", None),
        Patch((*node.texts("extra_args"), *node.texts("vllm_args")), node.environment("env")),
        extra,
        _on(node, "hardware_overrides"),
        {role: _role(part) for role in ROLES if (part := node.child(role)).data},
        node.strings("router"),
    )


def _verdict(node: Node, key: str) -> bool:
    word = node.text(key)
    if word not in _VERDICTS:
        raise InputError(f"{node.where}: {key} is {word!r}", hint="expected supported or unsupported")
    return _VERDICTS[word]


def _role(node: Node) -> RoleRules:
    patch = Patch((*node.texts("extra_args"), *node.texts("vllm_args")), node.environment("env"))
    return RoleRules(layout_of(node, "parallelism"), node.whole("tp", None), patch, _on(node, "hardware_overrides"))


def _hardware_bars(bars: Node) -> Mapping[str, int | Mapping[str, int]]:
    """The entries of `strategy_min_gpus` that are about machines."""
    data = {key: value for key, value in bars.data.items() if key not in known_strategies()}
    return min_gpus_of(Node(data, bars.where))
