"""Launches: the argv and environment of every node, and where each of its flags comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from k3hal.plan.environment import EnvDecision, settle_environment
from k3hal.plan.flags import Decision, argv_of, settle
from k3hal.plan.layers import Choice, Role, environment_layers, flag_layers
from k3hal.plan.layout import Layout, multi_node_args, role_args, single_node_args
from k3hal.plan.strategies import ROLES

NODE_FLAGS = ("node-rank", "headless", "data-parallel-start-rank", "nnodes", "master-addr", "data-parallel-address")
"""Keys of flags that differ between nodes or name them; `--set` cannot give them."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One process to start: `argv` keeps shell variables such as `$HEAD_IP` as they are."""

    role: str
    node: int
    rank: int
    argv: tuple[str, ...]
    env: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Group:
    """The launches of one copy of the model: a whole aggregated plan, or one pool of a prefill/decode cluster.

    `decisions` are those of rank 0; other ranks differ in what names the node.
    """

    role: str
    layout: Layout
    launches: tuple[Launch, ...]
    decisions: tuple[Decision, ...]
    environment: tuple[EnvDecision, ...]

    def value(self, key: str) -> str | None:
        """What stands of a flag (without its dashes); None where it is not set or a switch."""
        return next((d.chosen.value for d in self.decisions if d.chosen.key == key), None)

    def is_on(self, key: str) -> bool:
        """Whether a switch is set, and not by its `--no-` form."""
        return any(d.chosen.key == key and not d.chosen.flag.startswith("--no-") for d in self.decisions)


def aggregated_group(choice: Choice, layout: Layout, model_id: str) -> Group:
    """The group of a strategy without roles."""
    launches, decided = [], []
    environment = settle_environment(environment_layers(choice))
    for rank in range(layout.nodes):
        parallel = single_node_args(layout) if choice.strategy.span == "single" else multi_node_args(layout, rank)
        decided.append(settle(flag_layers(choice, parallel)))
        launches.append(Launch("server", rank, rank, _argv(model_id, decided[-1]), _values(environment)))
    return Group("server", layout, tuple(launches), tuple(decided[0]), tuple(environment))


def role_group(choice: Choice, role: Role, layout: Layout, model_id: str) -> Group:
    """One pool. Ranks above 0 name their own node as the host of the side channel."""
    environment = settle_environment(environment_layers(choice, role, layout.nodes))
    first = f"${role.name.upper()}_NODE_1"
    launches, decided = [], []
    for rank in range(layout.nodes):
        decided.append(settle(flag_layers(choice, role_args(layout, role.name, rank), role)))
        own = first.replace("_1", f"_{rank + 1}")
        env = {name: own if value == first else value for name, value in _values(environment).items()}
        launches.append(Launch(role.name, rank, rank, _argv(model_id, decided[-1]), env))
    return Group(role.name, layout, tuple(launches), tuple(decided[0]), tuple(environment))


def router_argv(choice: Choice, groups: list[Group]) -> list[str]:
    """The router before the pools: one address for each node that answers HTTP."""
    settings = {**choice.strategy.router, **choice.recipe.rules(choice.strategy.name).router}
    policy = settings.pop("policy", "round_robin")
    argv = ["vllm-router", "--policy", policy, "--vllm-pd-disaggregation"]
    for role in ROLES:
        group = next(group for group in groups if group.role == role)
        port = group.value("port") or str(choice.strategy.roles[role].port)
        answering = group.layout.nodes if group.layout.kind == "dep" else 1
        for node in range(1, answering + 1):
            argv += [f"--{role}", f"http://${role.upper()}_NODE_{node}:{port}"]
    argv += ["--host", "$ROUTER_HOST", "--port", "$ROUTER_PORT"]
    for name, value in settings.items():
        argv += [f"--{name.replace('_', '-')}", value]
    return argv


def _argv(model_id: str, decisions: list[Decision]) -> tuple[str, ...]:
    return ("vllm", "serve", model_id, *argv_of(decisions))


def _values(environment: list[EnvDecision]) -> dict[str, str]:
    return {decision.name: decision.value for decision in environment}
