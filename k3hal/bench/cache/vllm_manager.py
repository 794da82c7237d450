"""Drives vLLM's own KV cache manager, for another interpreter too: imports vLLM, torch and the standard library only.

    PYTHON vllm_manager.py JOB    reads `JOB` (JSON, see `run_job`) and prints one JSON document.

vLLM's scheduler is not run, so its rules for where a prefill chunk of a hybrid model must stop stand in `_stop`:
chunk ends on block boundaries, the last checkpoint of the prompt, its last match unit, and a shared-prefix junction.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import time
from importlib import import_module
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

BLOCK_TOKENS = 1536
"""Tokens of a block at TP8 and fp8 KV: the least multiple of 128 whose latents are no smaller than a layer's state."""

HASH_TOKENS = 128
LATENT_BYTES = 576
MLA_LAYERS, KDA_LAYERS, KDA_GROUPS = 24, 69, 3
BLOCK_BYTES = BLOCK_TOKENS * LATENT_BYTES * MLA_LAYERS
STEP_TOKENS = 16_384


def run_job(job: dict[str, Any]) -> dict[str, Any]:
    """`{"requests": [[[start, size], ...], ...], "budgets": [bytes, ...], "retention": 0, "micro": bool}`.

    A request is the spans of its prompt. The result has `version`, `hit_rates` in the order of `budgets`, and with
    `micro` the time of the manager's own work.
    """
    hits = [_replay(job["requests"], budget // BLOCK_BYTES, job["retention"]) for budget in job["budgets"]]
    micro = _micro() if job["micro"] else None
    return {"version": import_module("vllm").__version__, "hit_rates": hits, "micro": micro}


def _manager(num_blocks: int, retention: int | None) -> Any:
    """K3 at TP8 with fp8 KV as vLLM groups it: one MLA group and three groups of 23 KDA layers."""
    import torch
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec, MLAAttentionSpec

    mla = MLAAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=LATENT_BYTES, dtype=torch.uint8)
    kda = MambaSpec(
        block_size=BLOCK_TOKENS,
        shapes=((3, 4608), (12, 128, 128)),
        dtypes=(torch.bfloat16, torch.float32),
        page_size_padded=BLOCK_TOKENS * LATENT_BYTES,
        mamba_cache_mode="align",
        num_speculative_blocks=0,
    )
    groups = [KVCacheGroupSpec([f"mla.{i}" for i in range(MLA_LAYERS)], mla)]
    for group in range(KDA_GROUPS):
        names = [f"kda.{group}.{i}" for i in range(KDA_LAYERS // KDA_GROUPS)]
        groups.append(KVCacheGroupSpec(names, kda))
    config = KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=groups,
        prefix_cache_retention_interval=retention,
    )
    return KVCacheManager(
        config,
        max_model_len=1 << 20,
        scheduler_block_size=BLOCK_TOKENS,
        hash_block_size=HASH_TOKENS,
        enable_caching=True,
        log_stats=True,
    )


def _hasher() -> Any:
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

    init_none_hash(sha256)
    return get_request_block_hasher(HASH_TOKENS, sha256)


def _request(name: str, tokens: list[int], hasher: Any) -> Any:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    return Request(name, tokens, SamplingParams(max_tokens=100_000), None, block_hasher=hasher)


def _stop(request: Any, start: int, count: int) -> int:
    """Tokens of the chunk that begins at `start` and may have `count`."""
    from vllm.v1.kv_cache_interface import get_mamba_prefill_checkpoint_position as checkpoint

    prompt = request.num_prompt_tokens
    if start >= prompt:
        return count
    end = start + count
    if end < prompt:
        end = end // BLOCK_TOKENS * BLOCK_TOKENS
    wishes = [checkpoint(request.num_tokens, BLOCK_TOKENS, False)]
    if start % BLOCK_TOKENS:
        wishes.append((start // BLOCK_TOKENS + 1) * BLOCK_TOKENS)
    tail = checkpoint(prompt, HASH_TOKENS, False)
    if wishes[0] < tail < prompt:
        wishes.append(tail)
    junction = request.shared_prefix_boundary
    if start < junction < end:
        wishes.append(start + (junction - start) // BLOCK_TOKENS * BLOCK_TOKENS)
    return min((wish for wish in wishes if start < wish < end), default=end) - start


def _settle(manager: Any) -> None:
    """What the worker would do after a step: finish copies and hand-offs."""
    pinned = manager.take_kv_cache_block_copies()[1]
    if pinned:
        manager.block_pool.free_blocks(pinned)
    for group in manager.coordinator.single_type_managers:
        group.take_pending_boundary_state_offloads()


def _prefill(manager: Any, request: Any) -> int:
    """Look a request up and compute its prompt; the hit tokens."""
    manager.new_step_starts()
    blocks, hit, request.shared_prefix_boundary = manager.get_computed_blocks(request)
    start, prompt = hit, request.num_prompt_tokens
    while start < prompt:
        count = _stop(request, start, min(STEP_TOKENS, prompt - start))
        if start == hit:
            given = manager.allocate_slots(request, count, hit, blocks)
        else:
            manager.new_step_starts()
            given = manager.allocate_slots(request, count)
        _settle(manager)
        if given is None:
            raise MemoryError(f"a prompt of {prompt} tokens does not fit")
        start += count
        request.num_computed_tokens = start
    return hit


def _replay(requests: list[list[list[int]]], num_blocks: int, retention: int | None) -> float:
    """Hit rate of prompts one after the other; outputs are left out, since no retention keeps what was decoded."""
    manager, hasher = _manager(num_blocks, retention), _hasher()
    hits = total = 0
    for number, spans in enumerate(requests):
        tokens = [token for start, size in spans for token in range(start, start + size)]
        request = _request(str(number), tokens, hasher)
        hits += _prefill(manager, request)
        total += len(tokens)
        manager.free(request)
    return hits / total


def _micro() -> dict[str, float]:
    """Median µs of a decode step of 256, of hashing and looking up 12,000 tokens, of 100 blocks got and freed."""
    manager, hasher = _manager(40_000, 0), _hasher()
    requests = []
    for number in range(256):
        requests.append(_request(str(number), list(range(number << 24, (number << 24) + 4096)), hasher))
        _prefill(manager, requests[-1])
    gc.collect()
    gc.disable()
    steps = [_decode(manager, requests, step) for step in range(40)]
    lookups = []
    for number in range(30):
        tokens = list(range(number << 24, (number << 24) + 12_000))
        start = time.perf_counter()
        manager.get_computed_blocks(_request(f"l{number}", tokens, hasher))
        lookups.append(time.perf_counter() - start)
    pool, pages = manager.block_pool, []
    for _ in range(100):
        start = time.perf_counter()
        pool.free_blocks(reversed(pool.get_new_blocks(100)))
        pages.append(time.perf_counter() - start)
    gc.enable()
    return {
        "step_256_us": 1e6 * statistics.median(steps),
        "hash_lookup_12k_us": 1e6 * statistics.median(lookups),
        "pages_100_us": 1e6 * statistics.median(pages),
    }


def _decode(manager: Any, requests: list[Any], step: int) -> float:
    start = time.perf_counter()
    manager.new_step_starts()
    for request in requests:
        request.append_output_token_ids(step)
        if manager.allocate_slots(request, 1) is None:
            raise MemoryError("256 requests do not fit")
        request.num_computed_tokens += 1
    _settle(manager)
    return time.perf_counter() - start


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as job_file:
        print(json.dumps(run_job(json.load(job_file))))
