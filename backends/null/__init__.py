"""The null backend: right shapes and no arithmetic, for running scheduler and server alone. Chosen only by name."""

from k3hal.dispatch import Backend

BACKEND = Backend(name="null", vendors=(), priority=0, auto=False)
