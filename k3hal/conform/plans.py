"""The dispatch plan of the small K3 model on the judged machine, for the package."""

from __future__ import annotations

from typing import Any

from k3hal.dispatch.device import DeviceDescription
from k3hal.dispatch.plan import make_plan
from k3hal.dispatch.plan_file import plan_json
from k3hal.dispatch.registry import Registry
from k3hal.dispatch.select import Selector
from k3hal.model.config import ModelConfig
from k3hal.model.presets import preset_config
from k3hal.model.requests import model_requests

PRESET, DTYPE = "nano", "bfloat16"


def example_plan(device: DeviceDescription, registry: Registry) -> dict[str, Any]:
    """The plan's JSON: what selection takes without overrides."""
    requests = model_requests(ModelConfig.from_json(preset_config(PRESET)), DTYPE, DTYPE)
    return plan_json(make_plan(requests, Selector(registry, (), "warn"), model=PRESET, device=device, dtype=DTYPE))
