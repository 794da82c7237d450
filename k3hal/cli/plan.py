"""`k3hal plan`: the deployment of a recipe on a machine, with the origin of every flag."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from k3hal.cli import plan_flags as flags
from k3hal.cli.common import Json
from k3hal.cli.output import print_json
from k3hal.cli.plan_check import FORMS, check
from k3hal.errors import UsageError

if TYPE_CHECKING:
    from k3hal.plan.deployment import Deployment
    from k3hal.plan.request import PlanRequest


def plan(
    ctx: typer.Context,
    hardware: flags.Hardware = None,
    nodes: flags.Nodes = None,
    prefill_nodes: flags.PrefillNodes = None,
    decode_nodes: flags.DecodeNodes = None,
    strategy: flags.Strategy = None,
    variant: flags.Variant = None,
    features: flags.Features = None,
    set_: flags.Set = None,
    model: flags.Model = None,
    for_: flags.For = "vllm",
    context: flags.Context = None,
    concurrency: flags.Concurrency = None,
    kv_offload: flags.KvOffload = None,
    as_json: Json = False,
    shell: flags.Shell = False,
    k8s: flags.K8s = False,
    compose: flags.Compose = False,
    slurm: flags.Slurm = False,
    explain: flags.Explain = False,
    capacity: flags.Capacity = False,
    picture: flags.Picture = None,
    workload: flags.Workload = None,
    p95: flags.P95 = None,
    storage: flags.Storage = None,
    inventory: flags.Inventory = None,
    recipe: flags.Recipe = None,
    matrix: flags.Matrix = False,
    lint: flags.Lint = None,
) -> int:
    """Plan a deployment of Kimi K3: every launch, its memory, and where each flag comes from.

    Exits with 2, naming the nearest plan that works, where the one asked for cannot. --lint exits with 1 on findings.
    """
    asked = ctx.params
    check(asked)
    if lint:
        return _lint(lint, as_json=as_json)
    if matrix or inventory:
        show = _matrix if matrix else _inventory
        show(asked)
        return 0
    made = _deployment(asked)
    if as_json:
        from k3hal.plan.document import SCHEMA, document

        print_json(SCHEMA, document(made) | _sections(made, asked, as_json=True))
    elif any(asked[form] for form in FORMS):
        typer.echo(_file(made, asked).rstrip("\n"))
    else:
        from k3hal.plan.text import plan_text

        blocks = ["\n".join(plan_text(made)), *_sections(made, asked, as_json=False).values()]
        typer.echo("\n\n".join(blocks))
    return 0


def _deployment(asked: dict[str, Any]) -> Deployment:
    from k3hal.plan.nearest import plan_or_refuse

    if asked["for_"] == "k3hal":
        return _serve_plan(asked)
    return plan_or_refuse(_request(asked))


def _request(asked: dict[str, Any]) -> PlanRequest:
    from k3hal.plan.features import feature_names
    from k3hal.plan.here import hardware_here, is_present, strategy_here
    from k3hal.plan.recipe_toml import builtin_recipe
    from k3hal.plan.request import PlanRequest, user_tokens

    if asked["recipe"]:
        from k3hal.plan.recipe_yaml import read_recipe

        recipe = read_recipe(asked["recipe"])
    else:
        recipe = builtin_recipe()
    offload, named = asked["kv_offload"], bool(asked["inventory"] or asked["matrix"])
    if asked["hardware"]:
        named = not is_present(asked["hardware"])
    machine = _hardware(asked["hardware"]) if named else hardware_here(asked["hardware"])
    names = ("variant", "nodes", "prefill_nodes", "decode_nodes", "model", "context", "concurrency")
    _check_model(asked["model"])
    return PlanRequest(
        recipe=recipe,
        hardware=machine,
        strategy=asked["strategy"] or (None if named else strategy_here(machine, recipe)),
        features=feature_names(recipe, asked["features"]),
        user_args=user_tokens(asked["set_"] or []),
        kv_args=("--kv-offloading-size", f"{offload:.12g}", "--kv-offloading-backend", "native") if offload else (),
        **{name: asked[name] for name in names},
    )


def _hardware(name: str | None) -> Any:
    from k3hal.plan.hardware import find_hardware, known_hardware
    from k3hal.plan.refusal import RefusedPlanError

    if name is None:  # an inventory names its own, and the matrix has all
        return next(iter(known_hardware().values()))
    machine = find_hardware(name)
    if machine is None:
        known = ", ".join(sorted(known_hardware()))
        raise RefusedPlanError(f"{name} is described, and no recipe is for it", hint=f"recipes are for {known}")
    return machine


def _serve_plan(asked: dict[str, Any]) -> Deployment:
    from k3hal.plan.here import is_present
    from k3hal.plan.k3hal_target import device_here, device_of, serve_plan
    from k3hal.plan.request import user_tokens

    _check_model(asked["model"])
    word = asked["hardware"] or "auto"
    if word != "auto" and not is_present(word):
        device = device_of(_hardware(word))
    else:
        from k3hal.dispatch.probe import probe

        device = device_here(probe(word))
    return serve_plan(device, asked["model"], user_tokens(asked["set_"] or []), asked["context"], asked["concurrency"])


def _check_model(model: Path | None) -> None:
    if model is not None and not model.exists():
        raise UsageError(f"model {str(model)!r} is neither a directory nor a config.json")


def _file(made: Deployment, asked: dict[str, Any]) -> str:
    """The plan in the form asked for."""
    from k3hal.plan.manifests import compose, kubernetes, slurm
    from k3hal.plan.shell import script

    forms = {"shell": script, "k8s": kubernetes, "compose": compose, "slurm": slurm}
    return next(write for form, write in forms.items() if asked[form])(made)


def _sections(made: Deployment, asked: dict[str, Any], *, as_json: bool) -> dict[str, Any]:
    """What --explain, --capacity and --workload add, each a JSON value or a text."""
    out: dict[str, Any] = {}
    if asked["explain"]:
        from k3hal.plan.operators import operator_lines, operators
        from k3hal.plan.text import origin_lines

        rows = operators(made)
        out["operators"] = rows if as_json else "\n".join([*origin_lines(made), "", *operator_lines(rows)])
    if asked["capacity"]:
        from k3hal.plan.capacity import capacity, capacity_document, capacity_text, picture

        rows = capacity(made)
        out["capacity"] = capacity_document(made, rows) if as_json else "\n".join(capacity_text(made, rows))
    if asked["workload"]:
        from k3hal.plan.trace import read_workload
        from k3hal.plan.workload import DEFAULT_TARGET, size_workload, sizing_document, sizing_text

        sizing = size_workload(made, read_workload(asked["workload"]), asked["p95"] or DEFAULT_TARGET, asked["storage"])
        out["workload"] = sizing_document(sizing) if as_json else "\n".join(sizing_text(sizing))
    if asked["picture"]:  # last, when nothing can be refused any more
        from k3hal.plan.capacity import capacity, picture

        _write(asked["picture"], picture(made, capacity(made)))
    return out


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--picture {path}: cannot write: {error.strerror}") from error


def _matrix(asked: dict[str, Any]) -> None:
    from k3hal.plan.matrix import SCHEMA, matrix, matrix_document, matrix_text
    from k3hal.plan.request import find_variant

    request = _request(asked)
    if request.variant:
        find_variant(request.recipe, request.variant)
    cells = matrix(request)
    if asked["as_json"]:
        print_json(SCHEMA, matrix_document(cells))
    else:
        typer.echo("\n".join(matrix_text(cells)).rstrip())


def _inventory(asked: dict[str, Any]) -> None:
    from k3hal.plan.inventory import SCHEMA, inventory_document, inventory_text, read_inventory, share_out
    from k3hal.plan.refusal import RefusedPlanError

    path: Path = asked["inventory"]
    shares = share_out(read_inventory(path), _request(asked))
    if not any(share.plan for share in shares):
        raise RefusedPlanError(f"{path}: no machine of it runs the model", hint=shares[0].refusal)
    if asked["as_json"]:
        print_json(SCHEMA, inventory_document(shares))
    else:
        typer.echo("\n".join(inventory_text(shares)))


def _lint(path: Path, *, as_json: bool) -> int:
    from k3hal.plan.lint import SCHEMA, lint

    findings = lint(path)
    if as_json:
        print_json(SCHEMA, {"recipe": str(path), "findings": [finding._asdict() for finding in findings]})
    else:
        for finding in findings:
            typer.echo(f"{finding.where}: {finding.message} [{finding.code}]")
        typer.echo(f"{path}: {len(findings) or 'no'} finding{'' if len(findings) == 1 else 's'}")
    return 1 if findings else 0
