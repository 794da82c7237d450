"""A plan for people: what runs where, whether it fits, and what to know."""

from __future__ import annotations

from collections.abc import Iterator

from k3hal.plan.deployment import Deployment
from k3hal.plan.memory import GB, GpuMemory
from k3hal.plan.shell import launch_line


def plan_text(plan: Deployment) -> Iterator[str]:
    """Line by line."""
    hardware = plan.hardware
    yield f"model     {plan.model_id} (recipe {plan.recipe}, variant {plan.variant})"
    devices = "1 device" if hardware.gpus == 1 else f"{hardware.gpus} GPUs"
    yield f"runs on   {plan.nodes} x {hardware.id} ({devices}, {hardware.node_gb:g} GB), {plan.strategy}"
    yield f"image     {plan.image or 'none known'}"
    for bar in {bar.source: bar for bar in plan.bars}.values():
        yield f"least     {bar.required} GPUs ({bar.source})"
    for group, fit in zip(plan.groups, plan.fits, strict=True):
        yield (
            f"{fit.source:<9} {group.role}: {fit.vram_min_gb:g} GB of {fit.available_gb:g} GB, "
            f"{fit.available_gb - fit.vram_min_gb:g} GB to spare"
        )
    for group, memory in zip(plan.groups, plan.memory, strict=False):
        yield f"manifest  {group.role}: {memory_line(memory)}"
    yield f"features  {', '.join(plan.features) or 'none'}"
    for warning in plan.warnings:
        yield f"warning   {warning}"
    for group in plan.groups:
        for launch in group.launches:
            yield ""
            yield f"# {launch.role}, node {launch.node}"
            yield launch_line(launch.env.items(), launch.argv)
    if plan.router:
        yield ""
        yield "# router"
        yield launch_line((), plan.router)


def memory_line(memory: GpuMemory) -> str:
    """The terms of one GPU, and what is left."""
    terms = {
        "weights": memory.weights,
        "activations": memory.activations,
        "graphs": memory.graphs,
        "runtime": memory.runtime,
        "KV": memory.kv,
        "state": memory.state,
    }
    listed = ", ".join(f"{name} {_gb(size)}" for name, size in terms.items())
    verdict = f"{memory.headroom / GB:.1f} to spare" if memory.ok else f"{-memory.headroom / GB:.1f} MISSING"
    most = memory.cost.sequences(memory.context, memory.room)
    return (
        f"{listed} GB of a GPU's {memory.device / GB:.0f} ({memory.budget / GB:.1f} the engine's): {verdict}; "
        f"{most} x {memory.context} tokens fit"
    )


def origin_lines(plan: Deployment) -> Iterator[str]:
    """Where each flag and variable comes from, and what it overrode."""
    for group in plan.groups:
        yield f"{group.role}: flag, its layer, and what it overrode"
        for decision in group.decisions:
            setting = decision.chosen
            shown = setting.flag if setting.value is None else f"{setting.flag} {setting.shown}"
            old = ", ".join(f"{old.shown or old.flag} of {old.layer}" for old in decision.overrode)
            yield f"    {shown}  <- {setting.layer}{f' over {old}' if old else ''}"
        for variable in group.environment:
            old = ", ".join(f"{value} of {layer}" for layer, value in variable.overrode)
            yield f"    {variable.name}={variable.value}  <- {variable.layer}{f' over {old}' if old else ''}"


def _gb(size: float) -> str:
    """With enough digits that a small model's parts are not all zero."""
    return f"{size / GB:.1f}" if size >= GB or not size else f"{size / GB:.2g}"
