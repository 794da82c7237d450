"""Whether a model fits, and how much of the memory becomes cache."""

from __future__ import annotations

from dataclasses import dataclass

from k3hal.engine.cache.layout import CacheLayout
from k3hal.errors import CapacityError
from k3hal.model.config import ModelConfig

GB = 10**9
_CPU_CACHE_LIMIT = 4 * GB
"""Cache taken on a CPU when nobody set a budget: the machine has other uses for its memory."""


@dataclass(frozen=True, slots=True)
class Workspace:
    """What steps of at most `num_tokens` tokens, `num_seqs` of them sampled, take in bytes: by token, and by row."""

    num_tokens: int
    of_tokens: int
    num_seqs: int
    of_rows: int

    @property
    def total(self) -> int:
        return self.of_tokens + self.of_rows

    @property
    def flag(self) -> str:
        """The flag that bounds most of it: a step has a token for every sequence at least."""
        by_rows = self.of_rows > self.of_tokens or self.num_tokens <= self.num_seqs
        return "--max-num-seqs" if by_rows else "--max-num-batched-tokens"


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """How a device's memory is used, in bytes, and what follows for the engine."""

    budget: int
    weights: int
    workspace: int
    cache: int
    num_runs: int
    max_model_len: int

    def __str__(self) -> str:
        return (
            f"{_gb(self.weights)} weights, {_gb(self.workspace)} workspace and {_gb(self.cache)} cache of "
            f"{_gb(self.budget)}; {self.max_model_len} tokens per sequence"
        )


def workspace_bytes(config: ModelConfig, itemsize: int, num_tokens: int, num_seqs: int, drafts: int = 0) -> Workspace:
    """What a step of `num_tokens` tokens and `num_seqs` sampled rows needs beside weights and cache: an upper estimate.

    Per token: the residual stream with its stored blocks, the widest attention layer's projections twice over, the
    experts' inputs and outputs. Per sampled row: the logits and what sorting them takes. With up to `drafts` drafts for
    each of those sequences, per draft: its logits, and what each KDA layer records of it until it is known to be kept.
    """
    blocks = 2 if not config.attn_res_block_size else 2 + 2 * config.num_layers // config.attn_res_block_size
    kda = 5 * config.kda_heads * config.kda_head_dim * 4 // itemsize + 4 * config.kda_heads * config.kda_head_dim
    mla = 2 * config.num_heads * (config.qk_head_dim + config.qk_nope_head_dim + 2 * config.v_head_dim)
    experts = config.top_k * (3 * config.moe_intermediate_size + 2 * config.expert_width)
    widths = (blocks + 6) * config.hidden_size + max(kda, mla, experts, 3 * config.intermediate_size)
    records = (
        sum(map(config.is_kda, range(config.num_layers))) * config.kda_heads * config.kda_head_dim * (4 + 5 * itemsize)
    )
    of_drafts = num_seqs * (drafts + 1) * (records + 4 * config.vocab_size) if drafts else 0
    rows = num_seqs * config.vocab_size * 32 + of_drafts
    return Workspace(num_tokens, num_tokens * widths * itemsize, num_seqs, rows)


def plan_memory(
    config: ModelConfig,
    layout: CacheLayout,
    *,
    weights: int,
    workspace: Workspace,
    free: int,
    budget: int | None,
    on_cpu: bool,
    max_model_len: int | None,
    max_num_seqs: int,
) -> MemoryPlan:
    """Divide `budget` bytes, or by default most of the `free` ones (half of them on a CPU).

    The cache takes what is left, up to what `max_num_seqs` sequences of full length need. Without `max_model_len` a
    sequence may grow to the model's own limit or to what the cache holds. Raises `CapacityError`, naming the GB that
    are missing, when one sequence does not fit.
    """
    if max_model_len is not None and max_model_len > config.max_position_embeddings:
        raise CapacityError(
            f"max_model_len {max_model_len} exceeds the model's {config.max_position_embeddings} positions",
            hint="lower --max-model-len",
        )
    wanted_len = max_model_len or config.max_position_embeddings
    total = budget if budget is not None else free // 2 if on_cpu else free * 9 // 10
    least = layout.runs_for(1, max_model_len or layout.page_tokens) * layout.run_bytes
    taken = weights + workspace.total
    room = total - taken
    if room < least:
        others = workspace.flag if workspace.total > weights + least else f"--max-model-len or {workspace.flag}"
        raise CapacityError(
            f"the model does not fit: {_gb(least - room)} are missing. Weights {_gb(weights)}, workspace "
            f"{_gb(workspace.total)} and the cache of one sequence {_gb(least)}; there are {_gb(total)}",
            hint=f"{'raise --memory-budget' if budget is not None else 'free memory'}, or lower {others}",
        )
    if budget is None and on_cpu:
        room = max(min(room, _CPU_CACHE_LIMIT), least)
    runs = min(layout.runs_for(max_num_seqs, wanted_len), room // layout.run_bytes)
    cache = runs * layout.run_bytes
    if taken + cache > free:
        raise CapacityError(
            f"the memory budget lets the engine take {_gb(taken + cache)}, but only {_gb(free)} are free",
            hint="lower --memory-budget, --max-num-seqs or --max-model-len",
        )
    longest = layout.longest_sequence(runs)
    length = wanted_len if longest is None else min(wanted_len, longest)
    return MemoryPlan(total, weights, workspace.total, cache, runs, length)


def _gb(size: int) -> str:
    """Bytes as GB, with enough digits that a small model's are not all zero."""
    return f"{size / GB:.2f} GB" if size >= GB else f"{size / GB:.3g} GB"
