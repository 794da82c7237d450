"""What can be chosen about an engine, checked once."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from k3hal.dispatch.select import FallbackPolicy
from k3hal.dispatch.words import nearest
from k3hal.engine.cache.policies import make_policy
from k3hal.engine.cache.policy import RetentionPolicy
from k3hal.engine.ngram import NgramDrafter, parse_drafter
from k3hal.errors import UsageError
from k3hal.model.config_parts import ExpertActivations

DType = Literal["auto", "float32", "bfloat16"]
KvCacheDType = Literal["auto", "bf16", "fp8"]
WarmUp = Literal["auto", "off", "full"]

_CHOICES = {
    "dtype": DType,
    "kv_cache_dtype": KvCacheDType,
    "expert_activations": ExpertActivations,
    "fallback": FallbackPolicy,
    "warm_up": WarmUp,
}

DEFAULT_MAX_NUM_SEQS = 64
DEFAULT_MAX_QUEUE = 1024
DEFAULT_HOST_GB = 2.0
"""Host memory under a disk or a store when nobody said how much: everything passes through it."""

MOST_STEPS_AHEAD = 3
MOST_TOKENS = 2**31 - 1
"""Tokens and sequences are counted in 32 bits."""

MOST_GB = 1e9
"""More than any machine has; its bytes, unlike those of 1e300 GB, are a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Options of `LLM`, `build_engine` and the command line, under the flags' names. None is the engine's choice.

    `expert_activations` `mxfp8` rounds what the routed experts' products take, for models whose experts are in MXFP4;
    `memory_budget` GB (1e9 bytes) for weights, cache and workspace; `max_model_len` tokens of prompt and output
    together; `max_num_seqs` sequences and `max_num_batched_tokens` tokens in one step; `max_queue` requests that may
    wait; `plan` a saved dispatch plan to pin; `ops` provider overrides; `tokenizer` a directory other than the model's;
    `mla_latent_norm_eps` the epsilon of the MLA latents' norms; `prefix_cache_policy` what of earlier sequences is kept
    (`cost`, `second-hit`, `prompt`, `interval` or `none`), `prefix_match_unit` the tokens in which prefixes are
    compared, `prefix_cache_retention_interval` the tokens between the snapshots of `interval`;
    `prefix_host_cache_gb` GB of host memory that keep what device memory gives up, `prefix_disk_cache` a folder that
    keeps it longer than the process lives, in at most `prefix_disk_cache_gb` GB; `prefix_mooncake` the configuration
    file of a Mooncake store that keeps it instead, for other engines too; `async_depth` steps are planned at once, so
    that planning takes no time between steps (1 plans each when the one before has been answered); `draft` who guesses
    tokens that a step then verifies (`ngram:N`: up to N of them, what followed when the last tokens came before);
    `graphs` decodes
    through captured graphs where the device has them; `warm_up` `full` tries the largest steps while the engine is
    built, `auto` does where the device's memory is counted: only then is it known that traffic fits. Nothing is tried
    while calls are recorded or checked.
    """

    device: str = "auto"
    dtype: DType = "auto"
    kv_cache_dtype: KvCacheDType = "auto"
    expert_activations: ExpertActivations = "auto"
    memory_budget: float | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_queue: int | None = None
    ops: str | None = None
    plan: str | Path | None = None
    fallback: FallbackPolicy = "warn"
    tokenizer: str | Path | None = None
    mla_latent_norm_eps: float = 1e-6
    prefix_cache_policy: str = "cost"
    prefix_match_unit: int = 128
    prefix_cache_retention_interval: int | None = None
    prefix_host_cache_gb: float | None = None
    prefix_disk_cache: str | Path | None = None
    prefix_disk_cache_gb: float | None = None
    prefix_mooncake: str | Path | None = None
    async_depth: int | None = None
    draft: str | None = None
    graphs: bool = True
    warm_up: WarmUp = "auto"

    @classmethod
    def of(cls, **options: Any) -> EngineOptions:
        """Options from keywords; one that is None counts as not given. Raises `UsageError`, for unknown names too."""
        names = [field.name for field in dataclasses.fields(cls)]
        for name in options:
            if name not in names:
                raise UsageError(f"unknown engine option {name!r}", hint=nearest(name, names))
        return cls(**{name: value for name, value in options.items() if value is not None})

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in get_args(choices):
                words = ", ".join(get_args(choices))
                raise UsageError(f"{name} is {getattr(self, name)!r}", hint=f"it is one of {words}")
        for name, kind, what in (
            ("device", str, "a device's name"),
            ("ops", str | None, 'a text like "kda_decode=reference"'),
            ("plan", str | Path | None, "a file's path"),
            ("tokenizer", str | Path | None, "a folder's path"),
            ("prefix_disk_cache", str | Path | None, "a folder's path"),
            ("prefix_mooncake", str | Path | None, "a file's path"),
            ("draft", str | None, "a drafter's name"),
        ):
            value = getattr(self, name)
            # An empty path would be the working directory, and no path holds a NUL.
            if not isinstance(value, kind) or (what.endswith("path") and value is not None and not _is_path(value)):
                raise UsageError(f"{name} is {value!r:.100}", hint=f"it is {what}")
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "prefix_match_unit"):
            self._check_integer(name, 1, MOST_TOKENS)
        self._check_integer("prefix_cache_retention_interval", 1)
        self._check_integer("max_queue", 0)
        self._check_integer("async_depth", 1)
        if type(self.graphs) is not bool:
            raise UsageError(f"graphs is {self.graphs!r:.100}", hint="it is True or False")
        if self.async_depth is not None and self.async_depth > MOST_STEPS_AHEAD:
            raise UsageError(f"async_depth is {self.async_depth}", hint=f"it is at most {MOST_STEPS_AHEAD}")
        if self.max_model_len == 1:
            raise UsageError("max_model_len is 1", hint="a prompt and one answer take at least 2 tokens")
        for name in ("memory_budget", "prefix_host_cache_gb", "prefix_disk_cache_gb"):
            value = getattr(self, name)
            if value is not None and not _is_positive(value):
                raise UsageError(f"{name} is {value!r}", hint="it is a positive number of GB")
            if value is not None and value > MOST_GB:
                raise UsageError(f"{name} is {value!r}", hint=f"it is at most {MOST_GB:g} GB")
        if not _is_positive(self.mla_latent_norm_eps):
            raise UsageError(
                f"mla_latent_norm_eps is {self.mla_latent_norm_eps!r}", hint="it is a small positive number"
            )
        self.policy()
        if self.drafter() and self.async_depth is not None and self.async_depth > 1:
            raise UsageError(
                f"draft {self.draft!r} and async_depth {self.async_depth} are both given: a draft follows a token that "
                "is known, and a step planned ahead does not wait for it",
                hint="leave one of them away",
            )
        self._check_tier()
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens < self.num_seqs:
            raise UsageError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, below max_num_seqs {self.max_num_seqs}",
                hint="raise it or lower max_num_seqs: every running sequence needs one token a step",
            )

    @property
    def num_seqs(self) -> int:
        return self.max_num_seqs or min(DEFAULT_MAX_NUM_SEQS, self.max_num_batched_tokens or DEFAULT_MAX_NUM_SEQS)

    @property
    def queue(self) -> int:
        return DEFAULT_MAX_QUEUE if self.max_queue is None else self.max_queue

    def depth(self, *, asynchronous: bool) -> int:
        """Steps planned at once: by default one more than runs where the device works while the host goes on.

        One where drafts are guessed: they follow a token that is known.
        """
        return self.async_depth or (2 if asynchronous and self.draft is None else 1)

    def policy(self) -> RetentionPolicy:
        """A new policy as asked for. Raises `UsageError`."""
        name, interval = self.prefix_cache_policy, self.prefix_cache_retention_interval
        if not isinstance(name, str):
            raise UsageError(f"prefix_cache_policy is {name!r:.100}", hint="it is a policy's name")
        if interval is not None and name != "interval":
            raise UsageError(
                f"prefix_cache_retention_interval is given, but prefix_cache_policy is {name!r}",
                hint="use prefix_cache_policy interval",
            )
        return make_policy(name if interval is None else f"{name}:{interval}")

    def drafter(self) -> NgramDrafter | None:
        """Who guesses tokens. Raises `UsageError`."""
        return None if self.draft is None else parse_drafter(self.draft)

    @property
    def num_drafts(self) -> int:
        """Drafts that a sequence takes along at most. Raises `UsageError`."""
        drafter = self.drafter()
        return drafter.count if drafter else 0

    def batched_tokens(self, *, on_cpu: bool) -> int:
        """Tokens of a step: few on a CPU, where a step of many would hold up every decoding sequence for seconds."""
        return self.max_num_batched_tokens or max(512 if on_cpu else 8192, self.num_seqs)

    @property
    def tier_flags(self) -> list[str]:
        """The options given that ask for an external tier."""
        names = ("prefix_host_cache_gb", "prefix_disk_cache", "prefix_mooncake")
        return [name for name in names if getattr(self, name) is not None]

    def _check_tier(self) -> None:
        tier = self.tier_flags
        if "prefix_disk_cache" in tier and "prefix_mooncake" in tier:
            raise UsageError("prefix_disk_cache and prefix_mooncake are both given", hint="give one of them")
        if tier and self.prefix_cache_policy == "none":
            raise UsageError(
                f"{tier[0]} is given, but prefix_cache_policy is 'none': nothing is kept that could go there",
                hint="use another policy",
            )
        if self.prefix_disk_cache_gb is not None and self.prefix_disk_cache is None:
            raise UsageError(
                "prefix_disk_cache_gb is given without prefix_disk_cache", hint="say which folder: prefix_disk_cache"
            )

    def _check_integer(self, name: str, low: int, high: int | None = None) -> None:
        value = getattr(self, name)
        if value is None:
            return
        if type(value) is not int or value < low:
            raise UsageError(f"{name} is {value!r:.100}", hint=f"it is an integer of at least {low}")
        if high is not None and value > high:
            raise UsageError(f"{name} is {value!r:.100}", hint=f"it is at most {high}")


def _is_path(value: str | Path) -> bool:
    return str(value) != "" and "\0" not in str(value)


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
