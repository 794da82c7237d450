"""A plan in other forms: each starts exactly the launches of the plan."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from .conftest import Answer
from .examples import EXAMPLES, PD

Plan = Callable[[str], Answer]

SAID = {"HEAD_IP": "10.0.0.1", "IFACE_NAME": "ib0", "DECODE_DP_RPC_PORT": "1", "ROUTER_HOST": "0", "ROUTER_PORT": "9"}
SAID |= {f"{role}_NODE_{node}": f"{role.lower()}{node}" for role in ("PREFILL", "DECODE") for node in range(1, 5)}
PLANS = {"one": EXAMPLES["one node"].args, "nodes": EXAMPLES["hopper over base"].args, "pools": PD}


def _filled(text: str) -> str:
    for name, value in sorted(SAID.items(), reverse=True):
        text = text.replace(f"${name}", value)
    return text


@pytest.fixture
def stub(tmp_path: Path) -> dict[str, str]:
    """An environment in which `vllm` and `vllm-router` print what they were started with."""
    for name in ("vllm", "vllm-router"):
        program = tmp_path / name
        program.write_text(
            "#!/usr/bin/env python3\nimport json, os, sys\n"
            f"print(json.dumps([[{name!r}, *sys.argv[1:]], dict(os.environ)]))\n"
        )
        program.chmod(0o755)
    return {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", **SAID}


@pytest.mark.parametrize("name", PLANS)
def test_the_script_starts_the_launches(name: str, plan: Plan, stub: dict[str, str], tmp_path: Path) -> None:
    document, script = plan(PLANS[name] + " --json").json, tmp_path / "plan.sh"
    script.write_text(plan(PLANS[name] + " --shell").out)
    started: list[tuple[str, int, list[str], dict[str, str]]] = [
        (launch["role"], launch["node"], launch["argv"], launch["env"]) for launch in document["launches"]
    ]
    if document["router"]:
        started.append(("router", 0, document["router"]["argv"], {}))
    for role, node, argv, env in started:
        command = ["bash", str(script), role, str(node)]
        done = subprocess.run(command, env=stub, capture_output=True, text=True, check=True)
        got_argv, got_env = json.loads(done.stdout)
        assert got_argv == [_filled(token) for token in argv]
        assert {key: got_env[key] for key in env} == {key: _filled(value) for key, value in env.items()}


def test_the_script_names_what_is_missing(plan: Plan, stub: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "plan.sh"
    script.write_text(plan(PLANS["nodes"] + " --shell").out)
    del stub["HEAD_IP"]
    done = subprocess.run(["bash", str(script), "server", "1"], env=stub, capture_output=True, text=True, check=False)
    assert done.returncode != 0 and "set HEAD_IP" in done.stderr
    done = subprocess.run(["bash", str(script), "server", "7"], env=stub, capture_output=True, text=True, check=False)
    assert done.returncode == 4 and "usage" in done.stderr


@pytest.mark.parametrize("name", PLANS)
def test_kubernetes(name: str, plan: Plan) -> None:
    document = plan(PLANS[name] + " --json").json
    objects = list(yaml.safe_load_all(plan(PLANS[name] + " --k8s").out))
    pods = [each for each in objects if each["kind"] == "StatefulSet"]
    services = {each["metadata"]["name"] for each in objects if each["kind"] == "Service"}
    assert len(pods) == len(document["launches"]) == len(services)
    for pod, launch in zip(pods, document["launches"], strict=True):
        container = pod["spec"]["template"]["spec"]["containers"][0]
        env = {each["name"]: each["value"] for each in container["env"]}
        resolved = [_expanded(token, env) for token in (*container["command"], *container["args"])]
        names = {"$HEAD_IP": "k3-server-0", "$PREFILL_NODE_1": "k3-prefill-0", "$DECODE_NODE_1": "k3-decode-0"}
        expected = [_replaced(token, {**names, "$DECODE_DP_RPC_PORT": "13345"}) for token in launch["argv"]]
        assert resolved == expected
        assert not any("$" in token for token in resolved)
        assert container["resources"]["limits"] == {"nvidia.com/gpu": document["hardware"]["gpus"]}
        assert pod["spec"]["serviceName"] in services
        assert set(launch["env"]) <= set(env)
    router = [each for each in objects if each["kind"] == "Deployment"]
    assert len(router) == (1 if document["router"] else 0)


def _expanded(token: str, env: dict[str, str]) -> str:
    for name, value in env.items():
        token = token.replace(f"$({name})", value)
    return token


def _replaced(token: str, names: dict[str, str]) -> str:
    for name, value in names.items():
        token = token.replace(name, value)
    return token


@pytest.mark.parametrize("name", PLANS)
def test_compose(name: str, plan: Plan) -> None:
    document = plan(PLANS[name] + " --json").json
    services: dict[str, Any] = yaml.safe_load(plan(PLANS[name] + " --compose").out)["services"]
    for launch in document["launches"]:
        service = services[f"{launch['role']}-{launch['node']}"]
        argv = [*service["entrypoint"], *service["command"]]
        assert [token.replace("${", "$").replace("}", "") if "${" in token else token for token in argv] == launch[
            "argv"
        ]
        assert set(service["environment"]) == set(launch["env"])
    assert ("router" in services) == bool(document["router"])


@pytest.mark.parametrize("name", PLANS)
def test_slurm(name: str, plan: Plan, stub: dict[str, str], tmp_path: Path) -> None:
    """With stubs for Slurm's own commands, every launch is started on its own node."""
    document, script = plan(PLANS[name] + " --json").json, tmp_path / "job.sh"
    script.write_text(plan(PLANS[name] + " --slurm").out)
    for command, body in {
        "scontrol": f"seq -f 'node%g' 0 {document['nodes'] - 1}",
        "srun": f'while [ "${{1#--}}" != "$1" ]; do shift; done; "$@" > "$(mktemp {tmp_path}/out.XXXXXX)"; sleep 2',
    }.items():
        (tmp_path / command).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / command).chmod(0o755)
    assert f"#SBATCH --nodes={document['nodes']}\n" in script.read_text()
    environment = {"PATH": stub["PATH"], "SLURM_JOB_NODELIST": "node[0-9]"}
    subprocess.run(["bash", str(script)], env=environment, capture_output=True, text=True, check=True)
    started = [json.loads(path.read_text())[0] for path in tmp_path.glob("out.*")]
    programs = [argv[0] for argv in started]
    assert programs.count("vllm") == document["nodes"] and programs.count("vllm-router") == bool(document["router"])
    assert not any("$" in token for argv in started for token in argv)


@pytest.mark.parametrize("hardware", ["mi355x", "ascend_910c --variant ascend_w4a8"])
def test_devices_of_other_vendors(hardware: str, plan: Plan) -> None:
    document = plan(f"--hardware {hardware} --json").json
    pod = next(
        each for each in yaml.safe_load_all(plan(f"--hardware {hardware} --k8s").out) if each["kind"] != "Service"
    )
    limits = pod["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert list(limits.values()) == [document["hardware"]["gpus"]] and "nvidia.com/gpu" not in limits
    services = yaml.safe_load(plan(f"--hardware {hardware} --compose").out)["services"]
    assert services["server-0"]["image"] == document["image"] and services["server-0"]["devices"]


OWN = "it's $HOME ${X} $(id) `id`\n#"


def test_a_value_of_the_user_s_reaches_the_server_as_it_is(plan: Plan, stub: dict[str, str], tmp_path: Path) -> None:
    """Whatever a form expands itself stands for itself, and a line of a warning begins no command."""
    args = f"--hardware b300 --set {shlex.quote(f'--tool-call-parser {shlex.quote(OWN)} --x {shlex.quote(OWN)}')}"
    assert OWN in plan(args + " --json").json["launches"][0]["argv"]
    script = tmp_path / "plan.sh"
    script.write_text(plan(args + " --shell").out)
    done = subprocess.run(["bash", str(script)], env=stub, capture_output=True, text=True, check=True)
    assert OWN in json.loads(done.stdout)[0] and not done.stderr
    service = yaml.safe_load(plan(args + " --compose").out)["services"]["server-0"]
    assert OWN.replace("$", "$$") in service["command"]
    pod = next(each for each in yaml.safe_load_all(plan(args + " --k8s").out) if each["kind"] != "Service")
    assert OWN.replace("$(", "$$(") in pod["spec"]["template"]["spec"]["containers"][0]["args"]
