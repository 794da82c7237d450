"""Public errors. All derive from `K3HALError`."""

from k3hal.dispatch.errors import (
    BackendError,
    CapacityError,
    CheckpointError,
    ConfigError,
    DeviceLostError,
    DispatchError,
    DrainingError,
    EngineDeadError,
    InputError,
    K3HALError,
    PlanError,
    ProbeError,
    QueueFullError,
    RequestError,
    UnsupportedError,
    UsageError,
)

__all__ = [
    "BackendError",
    "CapacityError",
    "CheckpointError",
    "ConfigError",
    "DeviceLostError",
    "DispatchError",
    "DrainingError",
    "EngineDeadError",
    "InputError",
    "K3HALError",
    "PlanError",
    "ProbeError",
    "QueueFullError",
    "RequestError",
    "UnsupportedError",
    "UsageError",
]
