"""What `bench serve` measures, checked before anything is started."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from k3hal.errors import UsageError

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
OBJECTIVES = ("ttft", "tpot", "e2el")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeBench:
    """The load. Without `base_url` a server of ours is started, and stopped afterwards.

    `request_rate` in requests a second, infinite for all at once, None for a trace's own times (all at once for
    synthetic prompts). `burstiness` is the shape of the gamma distribution of the gaps: 1 is a Poisson process, more is
    smoother. `concurrency` holds requests back beyond that many. `paced` starts a server without a model that
    answers with that many tokens a second in each stream. `goodput` maps objectives to milliseconds.
    """

    base_url: str | None = None
    model: str | None = None
    endpoint: str = COMPLETIONS
    api_key: str | None = None
    dataset: str = "synthetic"
    num_prompts: int = 100
    input_len: int = 256
    output_len: int = 64
    request_rate: float | None = None
    burstiness: float = 1.0
    concurrency: int | None = None
    paced: float | None = None
    warmups: int = 1
    goodput: dict[str, float]
    seed: int = 0
    timeout: float = 600.0
    server_pid: int | None = None
    details: bool = False

    def __post_init__(self) -> None:
        if self.base_url is not None:
            _check_url(self.base_url)
            if self.paced is not None:
                raise UsageError("--paced starts a server of its own", hint="leave out --base-url")
        elif self.server_pid is not None:
            raise UsageError("--server-pid belongs to --base-url")
        if self.paced is not None and (self.model is not None or self.dataset != "synthetic"):
            raise UsageError(
                "--paced answers synthetic prompts without a model", hint="leave out --model and --dataset"
            )
        if self.endpoint not in (COMPLETIONS, CHAT):
            raise UsageError(f"--endpoint is {self.endpoint!r}", hint=f"{COMPLETIONS} or {CHAT}")
        for name in ("num_prompts", "input_len", "output_len", "concurrency"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"--{name.replace('_', '-')} is {value}", hint="it is at least 1")
        if self.warmups < 0:
            raise UsageError(f"--num-warmups is {self.warmups}", hint="it is at least 0")
        for name in ("burstiness", "timeout", "paced"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise UsageError(f"--{name} is {value:g}", hint="a positive number")

    @property
    def trace(self) -> str | None:
        """The trace's source, None for synthetic prompts."""
        kind, _, source = self.dataset.partition(":")
        return source if kind == "trace" else None


def read_dataset(text: str) -> str:
    """`synthetic` or `trace:SOURCE`. Raises `UsageError`."""
    kind, _, source = text.partition(":")
    if text == "synthetic" or (kind == "trace" and source):
        return text
    raise UsageError(f"--dataset is {text!r}", hint="synthetic, or trace:FILE")


def read_rate(text: str | None) -> float | None:
    """Requests a second from `inf` or a positive number. Raises `UsageError`."""
    if text is None:
        return None
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not rate > 0:
        raise UsageError(f"--request-rate is {text!r}", hint="requests a second, or inf")
    return rate


def read_goodput(words: Sequence[str]) -> dict[str, float]:
    """Objectives like `ttft:500`, in milliseconds; a word may hold several. Raises `UsageError`."""
    out: dict[str, float] = {}
    for word in " ".join(words).replace(",", " ").split():
        name, _, number = word.partition(":")
        try:
            value = float(number)
        except ValueError:
            value = 0.0
        if name not in OBJECTIVES or not 0 < value < math.inf:
            raise UsageError(f"--goodput holds {word!r}", hint="NAME:MILLISECONDS with ttft, tpot or e2el")
        out[name] = value
    return out


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        fine = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, brackets that do not close
        fine = False
    if not fine or not url.isascii() or any(c.isspace() or ord(c) < 32 for c in url):
        raise UsageError(f"--base-url is {url!r}", hint="like http://127.0.0.1:8000")
