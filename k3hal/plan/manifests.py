"""A plan as files for Kubernetes, Docker Compose and Slurm."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import yaml

from k3hal.plan.deployment import Deployment
from k3hal.plan.hardware import Hardware
from k3hal.plan.launch import Group, Launch
from k3hal.plan.shell import launch_line, substituted, variables_of

ROUTER_PORT = "8000"
_DEVICES = {"NVIDIA": "nvidia.com/gpu", "AMD": "amd.com/gpu", "Huawei": "huawei.com/Ascend910"}


class _Plain(yaml.SafeDumper):
    """Writes an object that occurs twice out twice: references are hard to read."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def kubernetes(plan: Deployment) -> str:
    """One headless Service and one StatefulSet for each node of each group, and a router's Deployment.

    A node of its own is its own StatefulSet, so that every rank has its own argv; `$HEAD_IP` and the names of pools'
    nodes become the pods' stable DNS names.
    """
    objects: list[dict[str, Any]] = []
    for launch in _launches(plan):
        objects += _pod(plan, launch)
    if plan.router:
        objects.append(_router(plan))
    return yaml.dump_all(objects, Dumper=_Plain, sort_keys=False, width=10_000)


def compose(plan: Deployment) -> str:
    """One service a launch. Each is for its own machine: start one with `docker compose up NAME` there."""
    services = {}
    for launch in _launches(plan):
        command = _for_compose(launch.argv[1:])
        services[_name(launch)] = {
            "image": plan.image,
            "network_mode": "host",
            "ipc": "host",
            "entrypoint": [launch.argv[0]],
            "command": command,
            "environment": dict(zip(launch.env, _for_compose(list(launch.env.values())), strict=True)),
            **_compose_devices(plan.hardware),
        }
    if plan.router:
        command = _for_compose(plan.router[1:])
        services["router"] = {
            "image": plan.image,
            "network_mode": "host",
            "entrypoint": [plan.router[0]],
            "command": command,
        }
    return yaml.dump({"services": services}, Dumper=_Plain, sort_keys=False, width=10_000)


def slurm(plan: Deployment) -> str:
    """A batch script that starts every launch on its own node of one allocation."""
    lines = [
        "#!/usr/bin/env bash",
        f"#SBATCH --job-name={_label(plan)}-{plan.strategy.replace('_', '-')}",
        f"#SBATCH --nodes={plan.nodes}",
        f"#SBATCH --gpus-per-node={plan.hardware.gpus}",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --exclusive",
        "set -euo pipefail",
        ': "${IFACE_NAME:=eth0}"',
        'mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
        "export IFACE_NAME HEAD_IP=${hosts[0]}",
    ]
    index = 0
    for group in plan.groups:
        for launch in group.launches:
            if group.role != "server":
                lines.append(f"export {group.role.upper()}_NODE_{launch.node + 1}=${{hosts[{index}]}}")
            index += 1
    lines += ["export DECODE_DP_RPC_PORT=13345 PREFILL_DP_RPC_PORT=13346"] if plan.router else []
    for index, launch in enumerate(_launches(plan)):
        line = launch_line(launch.env.items(), launch.argv)
        lines.append(f'srun --nodes=1 --ntasks=1 --nodelist="${{hosts[{index}]}}" env {line} &')
    if plan.router:
        lines.append(f"export ROUTER_HOST=0.0.0.0 ROUTER_PORT={ROUTER_PORT}")
        lines.append(f'srun --nodes=1 --ntasks=1 --overlap --nodelist="${{hosts[0]}}" {launch_line((), plan.router)} &')
    return "\n".join([*lines, "wait -n"])


def _launches(plan: Deployment) -> Iterator[Launch]:
    for group in plan.groups:
        yield from group.launches


def _label(plan: Deployment) -> str:
    """The recipe's id as a name that Kubernetes and Slurm take, whatever a recipe file calls itself."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", plan.recipe)[:60].strip("._-") or "recipe"


def _name(launch: Launch) -> str:
    return f"{launch.role}-{launch.node}"


def _pod(plan: Deployment, launch: Launch) -> list[dict[str, Any]]:
    name = f"k3-{_name(launch)}"
    labels = {"app": name, "plan": _label(plan)}
    device = {_DEVICES[plan.hardware.brand]: plan.hardware.gpus}
    container = {
        "name": launch.role,
        "image": plan.image,
        "command": [launch.argv[0]],
        "args": _for_pods(launch.argv[1:]),
        "env": [*_pod_variables(plan, launch), *_pod_env(launch)],
        "resources": {"limits": device, "requests": device},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    spec = {
        "hostNetwork": True,
        "dnsPolicy": "ClusterFirstWithHostNet",
        # Kubernetes' own variables for a Service called k3hal would look like settings of this program.
        "enableServiceLinks": False,
        "containers": [container],
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
    }
    return [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": name, "labels": labels},
            "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"app": name}},
        },
        {
            "apiVersion": "apps/v1",
            "kind": "StatefulSet",
            "metadata": {"name": name, "labels": labels},
            "spec": {
                "serviceName": name,
                "replicas": 1,
                "selector": {"matchLabels": {"app": name}},
                "template": {"metadata": {"labels": labels}, "spec": spec},
            },
        },
    ]


def _router(plan: Deployment) -> dict[str, Any]:
    labels = {"app": "k3-router", "plan": _label(plan)}
    env = [*_variables(plan, plan.router), {"name": "ROUTER_HOST", "value": "0.0.0.0"}]
    container = {
        "name": "router",
        "image": plan.image,
        "command": [plan.router[0]],
        "args": _for_pods(plan.router[1:]),
        "env": [*env, {"name": "ROUTER_PORT", "value": ROUTER_PORT}],
    }
    template = {"metadata": {"labels": labels}, "spec": {"enableServiceLinks": False, "containers": [container]}}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "k3-router", "labels": labels},
        "spec": {"replicas": 1, "selector": {"matchLabels": {"app": "k3-router"}}, "template": template},
    }


def _pod_env(launch: Launch) -> list[dict[str, str]]:
    return [
        {"name": name, "value": value}
        for name, value in zip(launch.env, _for_pods(list(launch.env.values())), strict=True)
    ]


def _pod_variables(plan: Deployment, launch: Launch) -> list[dict[str, str]]:
    """Values of what the launch leaves open; they stand before the variables that use them."""
    return _variables(plan, [*launch.argv, *launch.env.values()])


def _variables(plan: Deployment, texts: Sequence[str]) -> list[dict[str, str]]:
    values = {"HEAD_IP": "k3-server-0", "IFACE_NAME": "eth0", "DECODE_DP_RPC_PORT": "13345"}
    values["PREFILL_DP_RPC_PORT"] = "13346"
    for group in plan.groups:
        values |= _hosts(group)
    return [{"name": name, "value": values[name]} for name in variables_of(texts) if name in values]


def _hosts(group: Group) -> dict[str, str]:
    names = range(1, group.layout.nodes + 1)
    return {f"{group.role.upper()}_NODE_{node}": f"k3-{group.role}-{node - 1}" for node in names}


def _for_pods(tokens: Sequence[str]) -> list[str]:
    return [substituted(token, r"$(\1)", ("$(", "$$(")) for token in tokens]


def _for_compose(tokens: Sequence[str]) -> list[str]:
    return [substituted(token, r"${\1}", ("$", "$$")) for token in tokens]


def _compose_devices(hardware: Hardware) -> dict[str, Any]:
    if hardware.brand == "NVIDIA":
        reservation = {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
        return {"deploy": {"resources": {"reservations": {"devices": [reservation]}}}}
    if hardware.brand == "AMD":
        return {"devices": ["/dev/kfd", "/dev/dri"], "group_add": ["video"]}
    return {"devices": [f"/dev/davinci{index}" for index in range(hardware.gpus)] + ["/dev/davinci_manager"]}
