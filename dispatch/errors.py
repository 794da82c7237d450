"""The error hierarchy of K3HAL: one line that says what is wrong, where, and what to do."""

from __future__ import annotations


class K3HALError(Exception):
    """Root of every error a user can cause or must know about.

    `exit_code` is what the command line returns for it; `code` is the stable machine-readable name
    printed by `--json`; `hint` says what to do next.
    """

    exit_code: int = 3
    code: str = "internal"

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class UsageError(K3HALError):
    """A flag, environment variable or argument is wrong."""

    exit_code, code = 4, "usage"


class InputError(K3HALError):
    """A file or request given by the user is malformed."""

    exit_code, code = 4, "bad_input"


class ConfigError(InputError):
    """A model or engine configuration cannot be used as written."""

    code = "bad_config"


class CheckpointError(InputError):
    """A checkpoint's tensors, index, shards or sizes are not what its config promises."""

    code = "bad_checkpoint"


class RequestError(InputError):
    """A generation request is invalid; `param` names the offending field."""

    code = "bad_request"

    def __init__(self, message: str, *, hint: str = "", param: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.param = param


class UnsupportedError(K3HALError):
    """Nothing is wrong with the input, but this build or machine refuses it."""

    exit_code, code = 2, "unsupported"


class CapacityError(UnsupportedError):
    """The work does not fit the memory, pages or slots there are."""

    code = "capacity"


class QueueFullError(CapacityError):
    """The engine's waiting queue is full; try again after `retry_after` seconds."""

    code = "queue_full"

    def __init__(self, message: str, *, hint: str = "", retry_after: float = 1.0) -> None:
        super().__init__(message, hint=hint)
        self.retry_after = retry_after


class DrainingError(UnsupportedError):
    """The engine is shutting down and accepts no new request."""

    code = "draining"


class EngineDeadError(K3HALError):
    """The engine failed for good; the process must be restarted."""

    code = "engine_dead"


class DeviceLostError(EngineDeadError):
    """A device no longer works for this process; nothing it holds can be used any more."""

    code = "device_lost"


class DispatchError(UnsupportedError):
    """No provider may run an operator under the policy in force."""

    code = "no_provider"


class PlanError(InputError):
    """A saved dispatch plan does not fit this model or machine."""

    code = "bad_plan"


class BackendError(K3HALError):
    """A backend package is broken: it fails to import, breaks an operator's contract or crashes when asked."""

    code = "bad_backend"


class ProbeError(K3HALError):
    """A device's driver or its torch extension is there and does not answer; nothing is concluded from that."""

    code = "probe_failed"
