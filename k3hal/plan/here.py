"""The machine this runs on, as a node to plan for."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from k3hal.plan.hardware import Hardware, known_hardware
from k3hal.plan.recipe import Recipe
from k3hal.plan.refusal import RefusedPlanError

if TYPE_CHECKING:
    from k3hal.dispatch.device import DeviceDescription


def strategy_here(hardware: Hardware, recipe: Recipe) -> str | None:
    """The recipe's default for a machine with fewer accelerators than its kind: it is not one of many equal nodes."""
    return recipe.default_strategy if hardware != known_hardware()[hardware.id] else None


def is_present(word: str) -> bool:
    """Whether a `--hardware` word speaks of this machine (`cpu`, `cuda`, `cuda:1`, `auto`), not of a described one."""
    from k3hal.dispatch.probe import PRESENT_KINDS

    return word.strip().lower().partition(":")[0] in PRESENT_KINDS


def hardware_here(word: str | None = None) -> Hardware:
    """This machine's accelerators as a node, or those that a device `word` names.

    Raises `RefusedPlanError` with the known ids where a recipe is for none of them. Probing loads torch and
    initialises the drivers.
    """
    from k3hal.dispatch.describe import described_as

    known = known_hardware()
    found = [(device, described_as(device.title)) for device in _devices(word) if device.vendor != "cpu"]
    names = {described.id for _, described in found if described} & set(known)
    if len(names) != 1:
        what = ", ".join(sorted({device.title or device.id for device, _ in found})) or "a machine without accelerators"
        what = "a CPU" if word and word.strip().lower() == "cpu" else what
        raise RefusedPlanError(
            f"this is {what}: no recipe is for it", hint=f"give --hardware: {', '.join(sorted(known))}"
        )
    machine = known[names.pop()]
    gpus = sum(1 for _, described in found if described and described.id == machine.id)
    return replace(machine, gpus=gpus, node_gb=machine.gpu_gb * gpus)


def _devices(word: str | None) -> tuple[DeviceDescription, ...]:
    """All devices; with `cuda` those of a kind, with `cuda:1` that one."""
    from k3hal.dispatch.probe import present_devices, probe

    kind, colon, _ = (word or "auto").strip().lower().partition(":")
    if word is None or kind == "auto":
        return present_devices()
    named = probe(word)
    if colon or kind == "cpu":
        return (named,)
    return tuple(device for device in present_devices() if device.id.partition(":")[0] == kind)
