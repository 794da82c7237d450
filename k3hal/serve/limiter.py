"""How much each key may ask: a rate of requests, and how many at once."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from k3hal.serve.http_errors import HttpError
from k3hal.serve.keys import Limits
from k3hal.serve.pace import Pace


@dataclass(slots=True)
class _Account:
    """`allowance` is a token bucket's level at the time `updated`; `open` counts requests that are being answered."""

    allowance: float
    updated: float
    pace: Pace
    open: int = 0


class Limiter:
    """One account per owner. There are no more owners than keys, so nothing has to be forgotten."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._accounts: dict[str, _Account] = {}

    def enter(self, owner: str, limits: Limits) -> None:
        """Count a request that begins; `leave` must follow. Raises `HttpError` 429, and then nothing is counted."""
        account = self._accounts.get(owner)
        if account is None:
            full = float(limits.requests_per_minute or 0)
            account = self._accounts[owner] = _Account(full, self._clock(), Pace(self._clock))
        most = limits.max_concurrent
        if most is not None and account.open >= most:
            raise _refusal(f"this key may have {most} requests at a time", account.pace.until(1), "concurrency_limit")
        rate = limits.requests_per_minute
        if rate is not None:
            now = self._clock()
            account.allowance = min(float(rate), account.allowance + (now - account.updated) * rate / 60)
            account.updated = now
            if account.allowance < 1:
                wait = (1 - account.allowance) * 60 / rate
                raise _refusal(f"this key may make {rate} requests a minute", wait, "rate_limit")
            account.allowance -= 1
        if account.open == 0:
            account.pace.began()
        account.open += 1

    def leave(self, owner: str) -> None:
        account = self._accounts[owner]
        account.open -= 1
        account.pace.ended()


def _refusal(message: str, wait: float, code: str) -> HttpError:
    error = HttpError(429, message, kind="rate_limit_error", code=code)
    error.headers["Retry-After"] = str(max(1, math.ceil(wait)))
    return error
