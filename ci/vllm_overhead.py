"""What K3HAL's adapter costs in vLLM: its steps beside the own engine's, on one model, batch and thread count.

`ci/vllm_overhead.py MODEL [--seqs N] [--context N] [--repeats N] [--dtype D]`, where vLLM is. It prints JSON:
`vllm_us` is a decode step's metadata, forward pass and logits in vLLM, `own_us` the model's part of the same step in
K3HAL's engine, `metadata_us` the conversion alone, `ratio` that of neighbours: medians of repetitions that take turns.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}

Work = Callable[[], None]
CLOCKS = {"wall": time.perf_counter, "cpu": time.thread_time}
_NEW_TOKENS = 24
"""More than the steps in which the prompts come in: then all decode at once for a while."""


def prompts(seqs: int, context: int) -> list[list[int]]:
    return [[(7 * i + 3 * j) % 360 for j in range(context - i % 7)] for i in range(seqs)]


class Watch:
    """Keeps what a decode step of `seqs` sequences was made from, while vLLM runs."""

    def __init__(self, seqs: int) -> None:
        self.seqs, self.builds = seqs, []
        self.step: Any = None
        self._undo: list[tuple[type, str, Any]] = []

    def __enter__(self) -> Watch:
        from k3hal.vllm import backends
        from k3hal.vllm.model import KimiLinearForCausalLM

        for builder, method in (
            (backends.MlaBuilder, "build"), (backends.KdaBuilder, "build"), (backends.KdaBuilder, "update_block_table"),
        ):  # fmt: skip
            self._replace(builder, method, self._building(method, getattr(builder, method)))
        self._replace(KimiLinearForCausalLM, "forward", self._running(KimiLinearForCausalLM.forward))
        return self

    def __exit__(self, *_: object) -> None:
        for owner, name, inner in self._undo:
            setattr(owner, name, inner)

    def _replace(self, owner: type, name: str, outer: Any) -> None:
        self._undo.append((owner, name, getattr(owner, name)))
        setattr(owner, name, outer)

    def _building(self, method: str, inner: Any) -> Any:
        def outer(builder: Any, *args: Any) -> Any:
            metadata = inner(builder, *args)
            self.builds.append((builder, method, tuple(map(held, args)), metadata))
            return metadata

        return outer

    def _running(self, inner: Any) -> Any:
        from vllm.forward_context import get_forward_context

        def outer(model: Any, input_ids: Any, positions: Any, *args: Any, **kwargs: Any) -> Any:
            metadata = get_forward_context().attn_metadata
            if metadata is not None and input_ids.shape[0] == self.seqs:
                self.step = (model, input_ids.clone(), positions.clone(), self.builds, metadata)
            self.builds = []
            return inner(model, input_ids, positions, *args, **kwargs)

        return outer


def vllm_step(model: str, seqs: int, context: int, dtype: str) -> tuple[Work, Work, int]:
    """A decode step of so many sequences, to be run again and again; its metadata alone; groups of layers."""
    from vllm.entrypoints.llm import LLM
    from vllm.forward_context import get_forward_context, set_forward_context
    from vllm.sampling_params import SamplingParams

    from k3hal.vllm.step import layer_batches

    with Watch(seqs) as watch:
        llm = LLM(
            model=model, skip_tokenizer_init=True, enforce_eager=True, dtype=dtype, max_num_seqs=seqs,
            max_model_len=context + 2 * _NEW_TOKENS, enable_prefix_caching=True,
        )  # fmt: skip
        asked = SamplingParams(temperature=0.0, max_tokens=_NEW_TOKENS, ignore_eos=True, detokenize=False)
        llm.generate([{"prompt_token_ids": ids} for ids in prompts(seqs, context)], asked, use_tqdm=False)
    runner, ids, positions, builds, metadata = watch.step
    names = {id(of): [name for name, value in metadata.items() if value is of] for *_, of in builds}

    def convert() -> dict[str, Any]:
        made: dict[str, Any] = {}
        first: dict[type, Any] = {}
        for builder, method, args, of in builds:
            args = (first[type(builder)], *args[1:]) if method == "update_block_table" else args
            new = getattr(builder, method)(*args)
            first.setdefault(type(builder), new)
            made.update(dict.fromkeys(names[id(of)], new))
        return made

    def step() -> None:
        get_forward_context().attn_metadata = convert()
        runner.compute_logits(runner.forward(ids, positions))

    def metadata_alone() -> None:
        made = convert()
        layer_batches(ids.long(), [made[name] for name in runner.caches.names])

    forward_context = set_forward_context(metadata, llm.llm_engine.vllm_config)
    forward_context.__enter__()
    keep_alive.append((llm, forward_context))
    return step, metadata_alone, len(builds)


def held(value: Any) -> Any:
    """The same with tensors of its own: vLLM writes every step into the same ones."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if type(value).__name__ == "CommonAttentionMetadata":
        value = copy.copy(value)
        for field in dataclasses.fields(value):
            if isinstance(tensor := getattr(value, field.name), torch.Tensor):
                setattr(value, field.name, tensor.clone())
    return value


keep_alive: list[Any] = []


def own_step(model: str, seqs: int, context: int, dtype: str) -> Work:
    """The model's part of the same step in K3HAL's engine."""
    from k3hal import LLM, SamplingParams

    llm = LLM(
        model, device="cpu", dtype=dtype, max_num_seqs=seqs, max_model_len=context + 2 * _NEW_TOKENS, memory_budget=2.0
    )
    assert llm._built is not None
    runner = llm._built.runner
    inner, seen = runner.model, {}

    class Watched:
        def forward(self, batch: Any, cache: Any, aux_layers: Any = ()) -> Any:
            if batch.num_decodes == seqs:
                seen["step"] = (batch, cache)
            return inner.forward(batch, cache, aux_layers)

        def logits(self, hidden: Any) -> Any:
            return inner.logits(hidden)

    runner.model = Watched()
    params = SamplingParams(temperature=0.0, max_tokens=_NEW_TOKENS, ignore_eos=True)
    llm.generate(prompts(seqs, context), params)
    batch, cache = seen["step"]
    keep_alive.append(llm)

    def step() -> None:
        inner.logits(inner.forward(batch, cache)[batch.logit_rows])

    return step


def timed(work: Work, clock: Callable[[], float]) -> float:
    begin = clock()
    work()
    return (clock() - begin) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--seqs", type=int, default=64)
    parser.add_argument("--context", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--clock", default="wall", choices=CLOCKS, help="cpu: of one thread, on a machine that is busy")
    asked = parser.parse_args()
    shape = (asked.model, asked.seqs, asked.context, asked.dtype)
    theirs, metadata, groups = vllm_step(*shape)
    ours = own_step(*shape)
    clock = CLOCKS[asked.clock]
    both = [(timed(theirs, clock), timed(ours, clock)) for _ in range(asked.repeats)]
    conversion = [timed(metadata, clock) for _ in range(20 * asked.repeats)]
    vllm_us, own_us = (statistics.median(side) for side in zip(*both, strict=True))
    ratio = statistics.median(theirs / ours for theirs, ours in both)
    print(
        json.dumps(
            {
                "schema": "k3hal.vllm_overhead/1", "seqs": asked.seqs, "context": asked.context, "dtype": asked.dtype,
                "groups": groups, "clock": asked.clock, "vllm_us": round(vllm_us, 1), "own_us": round(own_us, 1),
                "ratio": round(ratio, 4), "metadata_us": round(statistics.median(conversion), 1),
            }
        )
    )  # fmt: skip
    sys.stdout.flush()
    os._exit(0)  # vLLM's and the engine's threads have nothing to say any more


if __name__ == "__main__":
    main()
