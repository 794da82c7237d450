"""Public errors. All derive from `K3HALError`."""

from k3hal.dispatch.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    DispatchError,
    DrainingError,
    EngineDeadError,
    InputError,
    K3HALError,
    PlanError,
    QueueFullError,
    RequestError,
    UnsupportedError,
    UsageError,
)

__all__ = [
    "CapacityError",
    "CheckpointError",
    "ConfigError",
    "DispatchError",
    "DrainingError",
    "EngineDeadError",
    "InputError",
    "K3HALError",
    "PlanError",
    "QueueFullError",
    "RequestError",
    "UnsupportedError",
    "UsageError",
]
