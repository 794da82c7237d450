"""Whether a model fits, and how much of the memory becomes cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Literal

from k3hal.engine.cache.layout import CacheLayout
from k3hal.errors import CapacityError
from k3hal.model.config import ModelConfig

GB = 10**9
_MB = 10**6
_CPU_CACHE_LIMIT = 4 * GB
"""Cache taken on a CPU when nobody set a budget: the machine has other uses for its memory."""

CODE = 512 * _MB
"""What a driver is thought to take beside the tensors, for contexts and kernels, until that has been measured."""

_GRAPH = 16 * _MB
"""What a captured graph is thought to take beside the pool that all share: on an H200 it was 20 MB for four layers."""

_MARGIN = 256 * _MB

_SEQS = "--max-num-seqs"

How = Literal["computed", "measured", "allowance"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Bytes that an engine takes beside its cache.

    `workspace` is what a step takes and gives back, `drafts` what those of a step take beside it, `buffers` what stays
    between steps (the sampler's tables, scratch that libraries keep), `graphs` what captured graphs hold, `code` what
    the driver takes beside all tensors, `margin` what stays free, as pieces between tensors do. `measured` names those
    that were measured, `step_flag` is what makes the workspace smaller.
    """

    weights: int
    workspace: int
    drafts: int = 0
    buffers: int = 0
    graphs: int = 0
    code: int = 0
    margin: int = 0
    step_flag: str = "--max-num-batched-tokens"
    measured: frozenset[str] = frozenset()

    @property
    def total(self) -> int:
        return sum(size for _, size in self.sizes())

    def sizes(self) -> Iterator[tuple[str, int]]:
        for field in fields(self):
            if isinstance(size := getattr(self, field.name), int):
                yield field.name, size

    def how(self, name: str) -> How:
        """How a figure is known."""
        if name in self.measured:
            return "measured"
        return "allowance" if name in ("code", "margin") else "computed"


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
    """How the memory of a device is used, in bytes, and what follows for the engine."""

    budget: int
    free: int
    needs: Needs
    cache: int
    num_runs: int
    max_model_len: int

    @property
    def weights(self) -> int:
        return self.needs.weights

    @property
    def total(self) -> int:
        """All that is taken."""
        return self.needs.total + self.cache

    def items(self) -> Iterator[tuple[str, int, How]]:
        """The parts by name, their sizes, and how these are known; parts of which there is nothing are left out."""
        sizes = dict(self.needs.sizes())
        yield "weights", sizes.pop("weights"), self.needs.how("weights")
        yield "cache", self.cache, "computed"
        for name, size in sizes.items():
            if size:
                yield name, size, self.needs.how(name)

    def report(self) -> dict[str, Any]:
        """The plan as JSON has it, sizes in bytes."""
        return {
            "items": [{"item": name, "bytes": size, "known": how} for name, size, how in self.items()],
            "total": self.total,
            "budget": self.budget,
            "free": self.free,
            "max_model_len": self.max_model_len,
        }

    def __str__(self) -> str:
        parts = ", ".join(f"{gb(size)} {name}" for name, size, _ in self.items())
        return f"{parts} of {gb(self.budget)}; {self.max_model_len} tokens per sequence"


def workspace_bytes(config: ModelConfig, itemsize: int, num_tokens: int, num_seqs: int) -> Workspace:
    """What a step of `num_tokens` tokens and `num_seqs` sampled rows needs beside weights and cache: an upper estimate.

    Per token: the residual stream with its stored blocks, the widest attention layer's projections twice over, the
    experts' inputs and outputs. Per sampled row: the logits and what sorting them takes.
    """
    blocks = 2 if not config.attn_res_block_size else 2 + 2 * config.num_layers // config.attn_res_block_size
    kda = 5 * config.kda_heads * config.kda_head_dim * 4 // itemsize + 4 * config.kda_heads * config.kda_head_dim
    mla = 2 * config.num_heads * (config.qk_head_dim + config.qk_nope_head_dim + 2 * config.v_head_dim)
    experts = config.top_k * (3 * config.moe_intermediate_size + 2 * config.expert_width)
    widths = (blocks + 6) * config.hidden_size + max(kda, mla, experts, 3 * config.intermediate_size)
    return Workspace(num_tokens, num_tokens * widths * itemsize, num_seqs, num_seqs * config.vocab_size * 32)


def draft_bytes(config: ModelConfig, itemsize: int, num_seqs: int, drafts: int) -> int:
    """What `drafts` drafts of each of `num_seqs` sequences take, with the tokens they follow: their logits, and what
    each KDA layer records of them until it is known which are kept."""
    if not drafts:
        return 0
    width = config.kda_heads * config.kda_head_dim
    records = sum(map(config.is_kda, range(config.num_layers))) * width * (4 + 5 * itemsize)
    return num_seqs * (drafts + 1) * (records + 4 * config.vocab_size)


def piece_bytes(config: ModelConfig, itemsize: int, num_tokens: int) -> int:
    """What graphs around attention keep of `num_tokens` tokens, in the activations' size: each layer's projections."""
    kda = 5 * config.kda_heads * config.kda_head_dim
    mla = config.num_heads * (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim)
    of_kda = sum(map(config.is_kda, range(config.num_layers)))
    return num_tokens * itemsize * (of_kda * kda + (config.num_layers - of_kda) * mla)


def estimated_needs(
    config: ModelConfig,
    weights: int,
    itemsize: int,
    num_tokens: int,
    num_seqs: int,
    *,
    counted: bool,
    num_graphs: int,
    pieces: int = 0,
    drafts: int = 0,
) -> Needs:
    """What an engine is thought to need before anything ran, for steps of `num_tokens` tokens and `num_seqs` sequences.

    `counted` is a device whose memory is the engine's to divide and is counted; elsewhere there is no driver to make
    allowances for. Of the graphs some are cut around attention, for so many tokens (`pieces`) in all.
    """
    workspace = workspace_bytes(config, itemsize, num_tokens, num_seqs)
    return Needs(
        weights=weights,
        workspace=workspace.total,
        step_flag=workspace.flag,
        drafts=draft_bytes(config, itemsize, num_seqs, drafts),
        buffers=penalty_bytes(config.vocab_size, num_seqs),
        graphs=num_graphs
        and workspace_bytes(config, itemsize, num_seqs, 0).total
        + piece_bytes(config, itemsize, pieces)
        + num_graphs * _GRAPH,
        code=CODE if counted else 0,
        margin=margin_for(workspace.total) if counted else 0,
    )


def penalty_bytes(vocab_size: int, num_seqs: int) -> int:
    """The tables of `num_seqs` penalised rows, which grow by doubling: an int32 and a bool for each token there is."""
    rows = 4
    while rows < num_seqs:
        rows *= 2
    return rows * vocab_size * 5


def margin_for(workspace: int) -> int:
    """What fragments of an allocator's memory may take, of steps that need `workspace` at most."""
    return workspace // 8 + _MARGIN


def memory_budget(free: int, budget: int | None, *, on_cpu: bool) -> int:
    """Bytes an engine may take: the `budget` given, else most of the `free` ones (half of them on a CPU)."""
    return budget if budget is not None else free // 2 if on_cpu else free * 9 // 10


def plan_memory(
    config: ModelConfig,
    layout: CacheLayout,
    needs: Needs,
    *,
    free: int,
    budget: int | None,
    on_cpu: bool,
    max_model_len: int | None,
    max_num_seqs: int,
) -> MemoryPlan:
    """Divide `memory_budget`. `free` bytes were free before anything of `needs` was taken.

    The cache takes what is left, up to what `max_num_seqs` sequences of full length need. Without `max_model_len` a
    sequence may grow to the model's own limit or to what the cache holds. Raises `CapacityError`, naming the GB that
    are missing and what to lower, when one sequence does not fit.
    """
    if max_model_len is not None and max_model_len > config.max_position_embeddings:
        raise CapacityError(
            f"max_model_len {max_model_len} exceeds the model's {config.max_position_embeddings} positions",
            hint="lower --max-model-len",
        )
    wanted_len = max_model_len or config.max_position_embeddings
    total = memory_budget(free, budget, on_cpu=on_cpu)
    least = layout.runs_for(1, max_model_len or layout.page_tokens) * layout.run_bytes
    room = total - needs.total
    if room < least:
        raise _misfit(needs, least, total, least - room, budget is not None)
    if budget is None and on_cpu:
        room = max(min(room, _CPU_CACHE_LIMIT), least)
    runs = min(layout.runs_for(max_num_seqs, wanted_len), room // layout.run_bytes)
    cache = runs * layout.run_bytes
    if needs.total + cache > free:
        raise CapacityError(
            f"the memory budget lets the engine take {gb(needs.total + cache)}, but only {gb(free)} are free",
            hint="lower --memory-budget, --max-num-seqs or --max-model-len",
        )
    longest = layout.longest_sequence(runs)
    length = wanted_len if longest is None else min(wanted_len, longest)
    return MemoryPlan(total, free, needs, cache, runs, length)


def _misfit(needs: Needs, cache: int, total: int, missing: int, budget_given: bool) -> CapacityError:
    """Why nothing can run. Where one part takes more than all others only its flag helps."""
    sizes = {**dict(needs.sizes()), "cache": cache}
    parts = ", ".join(f"{name} {gb(size)}" for name, size in needs.sizes() if size or name == "weights")
    flags = {
        "cache": "--max-model-len",
        "workspace": needs.step_flag,
        "drafts": _SEQS,
        "buffers": _SEQS,
        "graphs": _SEQS,
    }
    order = sorted((name for name in flags if sizes[name]), key=lambda name: -sizes[name])
    if sizes[order[0]] > sum(sizes.values()) - sizes[order[0]]:
        order = order[:1]
    more = "raise --memory-budget" if budget_given else "free memory"
    return CapacityError(
        f"the model does not fit: {gb(missing)} are missing. W{parts[1:]} and the cache of one sequence "
        f"{gb(cache)}; there are {gb(total)}",
        hint=f"{more}, or lower {' or '.join(dict.fromkeys(flags[name] for name in order))}",
    )


def gb(size: int) -> str:
    """Bytes as GB, with enough digits that a small model's are not all zero."""
    return f"{size / GB:.2f} GB" if size >= GB else f"{size / GB:.3g} GB"
