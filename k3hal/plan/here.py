"""The machine this runs on, as a node to plan for."""

from __future__ import annotations

from dataclasses import replace

from k3hal.plan.hardware import Hardware, known_hardware
from k3hal.plan.recipe import Recipe
from k3hal.plan.refusal import RefusedPlanError


def strategy_here(hardware: Hardware, recipe: Recipe) -> str | None:
    """The recipe's default for a machine with fewer accelerators than its kind: it is not one of many equal nodes."""
    return recipe.default_strategy if hardware != known_hardware()[hardware.id] else None


def hardware_here() -> Hardware:
    """This machine's accelerators as a node. Raises `RefusedPlanError` with the known ids where it is none of them.

    Probing loads torch and initialises the drivers.
    """
    from k3hal.dispatch.describe import described_as
    from k3hal.dispatch.probe import present_devices

    known = known_hardware()
    found = [(device, described_as(device.title)) for device in present_devices() if device.vendor != "cpu"]
    names = {described.id for _, described in found if described} & set(known)
    if len(names) != 1:
        what = ", ".join(sorted({device.title or device.id for device, _ in found})) or "a machine without accelerators"
        raise RefusedPlanError(
            f"this is {what}: no recipe is for it", hint=f"give --hardware: {', '.join(sorted(known))}"
        )
    machine = known[names.pop()]
    gpus = sum(1 for _, described in found if described and described.id == machine.id)
    return replace(machine, gpus=gpus, node_gb=machine.gpu_gb * gpus)
