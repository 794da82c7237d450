"""`k3hal generate`: the answer to a prompt, a chat or a file of requests, without a server."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import typer

from k3hal.cli import common
from k3hal.cli import generate_flags as flags
from k3hal.cli.output import print_json

if TYPE_CHECKING:
    from k3hal.offline.settings import GenerateSettings

SCHEMA = "k3hal.generate/1"
BATCH_SCHEMA = "k3hal.generate_batch/1"


def generate(
    ctx: typer.Context,
    model: flags.Model = None,
    prompt: flags.Prompt = None,
    chat: flags.Chat = None,
    messages: flags.Messages = None,
    input: flags.Input = None,
    output: flags.Output = None,
    retry_failed: flags.RetryFailed = None,
    stream: flags.Stream = None,
    served_model_name: flags.ServedModelName = None,
    n: flags.N = None,
    max_tokens: flags.MaxTokens = None,
    min_tokens: flags.MinTokens = None,
    temperature: flags.Temperature = None,
    top_p: flags.TopP = None,
    top_k: flags.TopK = None,
    min_p: flags.MinP = None,
    presence_penalty: flags.PresencePenalty = None,
    frequency_penalty: flags.FrequencyPenalty = None,
    repetition_penalty: flags.RepetitionPenalty = None,
    seed: flags.Seed = None,
    stop: flags.Stop = None,
    stop_token_ids: flags.StopTokenIds = None,
    ignore_eos: flags.IgnoreEos = None,
    logprobs: flags.Logprobs = None,
    thinking_effort: flags.ThinkingEffort = None,
    ops: common.Ops = None,
    device: common.Device = None,
    dtype: common.DType = None,
    kv_cache_dtype: common.KvCacheDType = None,
    expert_activations: common.ExpertActivations = None,
    memory_budget: common.MemoryBudget = None,
    max_model_len: common.MaxModelLen = None,
    max_num_seqs: common.MaxNumSeqs = None,
    max_num_batched_tokens: common.MaxNumBatchedTokens = None,
    graphs: common.Graphs = None,
    draft: common.Draft = None,
    tokenizer: common.Tokenizer = None,
    plan: common.Plan = None,
    config: common.Config = None,
    as_json: common.Json = False,
) -> int:
    """Continue a prompt, answer a chat, or answer a file of requests.

    The text goes to standard output, everything else to standard error. A batch exits with 1 when a line failed.
    """
    from k3hal.offline.settings import GenerateSettings

    settings = common.settings_from(ctx, GenerateSettings)
    settings.check(as_json=as_json)
    return _one(settings, as_json=as_json) if settings.input is None else _batch(settings, as_json=as_json)


def _one(settings: GenerateSettings, *, as_json: bool) -> int:
    from k3hal.offline.one import answer

    value = answer(settings, as_json=as_json)
    if value is not None:
        print_json(SCHEMA, value)
    return 0


def _batch(settings: GenerateSettings, *, as_json: bool) -> int:
    from k3hal.offline.batch import run_batch

    result = run_batch(settings)
    if as_json:
        files = {"input": str(settings.input), "output": str(settings.output)}
        print_json(BATCH_SCHEMA, files | dataclasses.asdict(result))
    else:
        rate = f", {result.completion_tokens / result.seconds:.1f} tokens/s" if result.seconds else ""
        counts = f"{result.skipped} done before, {result.answered} now, {result.failed} failed"
        typer.echo(f"k3hal: {result.lines} lines: {counts}{rate}", err=True)
    return 1 if result.failed else 0
