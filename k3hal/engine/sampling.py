"""A request's sampling with every default filled in, as the scheduler and the sampler use it."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from k3hal.sampling_params import SamplingParams

_UINT64 = 2**64 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """What a request gets where it says nothing; a checkpoint's generation_config may set other values."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """`SamplingParams` resolved for one sequence.

    `top_k` 0 is off. `end_ids` stop silently (end of sequence), `stop_ids` are named in the output's `stop_reason`;
    `banned_ids` are those of both that may not come before `min_tokens` outputs. `seed` is unsigned 64 bit.
    """

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int
    min_tokens: int
    max_tokens: int
    end_ids: frozenset[int]
    stop_ids: frozenset[int]
    logprobs: int | None

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)

    @property
    def banned_ids(self) -> tuple[int, ...]:
        return tuple(sorted(self.end_ids | self.stop_ids)) if self.min_tokens else ()


def resolve_sampling(
    params: SamplingParams, defaults: GenerationDefaults, *, eos_token_ids: tuple[int, ...], room: int
) -> Sampling:
    """Fill in `params`; `room` is how many tokens the context still holds. Without a seed one is drawn here, once."""

    def pick(value: float | None, default: float) -> float:
        return default if value is None else value

    top_k = defaults.top_k if params.top_k is None else params.top_k
    return Sampling(
        temperature=pick(params.temperature, defaults.temperature),
        top_p=pick(params.top_p, defaults.top_p),
        top_k=max(top_k, 0),
        min_p=pick(params.min_p, defaults.min_p),
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=dict(params.logit_bias or {}),
        seed=secrets.randbits(64) if params.seed is None else params.seed & _UINT64,
        min_tokens=params.min_tokens,
        max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
        end_ids=frozenset() if params.ignore_eos else frozenset(eos_token_ids),
        stop_ids=frozenset(params.stop_token_ids),
        logprobs=params.logprobs,
    )
