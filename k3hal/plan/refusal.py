"""The error of a plan that cannot work."""

from __future__ import annotations

from k3hal.errors import UnsupportedError


class RefusedPlanError(UnsupportedError):
    """Nothing is wrong with what was asked, and no such deployment can work; the hint names one that does."""

    code = "plan_refused"
