"""Our engine as a contender: the core driven as `LLM.generate` drives it, detokenisation included."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import count

from k3hal.bench.runs import Run
from k3hal.bench.steps import ExpertCounter, Step, TimedModel, TimedRunner
from k3hal.engine.build import BuiltEngine
from k3hal.engine.interface import EngineOutput, EngineRequest
from k3hal.engine.outputs import Collector
from k3hal.errors import UnsupportedError, UsageError
from k3hal.sampling_params import SamplingParams


class Ours:
    """A built engine with clocks in it. It keeps them: use the engine for nothing else."""

    name = "k3hal"

    def __init__(self, built: BuiltEngine) -> None:
        self._built = built
        self._core = built.engine.core
        self._model = built.runner.model
        timed = TimedModel(self._model)
        built.runner.model = timed
        self._runner = TimedRunner(built.runner, timed)
        self._core.runner = self._runner
        self._ids = count()

    def run(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> Run:
        """Raises `UsageError` when no step decodes all sequences, `UnsupportedError` when one ends with an error."""
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        start = time.perf_counter()
        collectors: dict[str, Collector] = {}
        for index, prompt in enumerate(prompts):
            name = f"bench-{next(self._ids)}"
            collectors[name] = Collector(index, self._built.tokenizer, params)
            self._core.add(EngineRequest(name, prompt, params))
        steps, first = self._drive(collectors)
        results = [collector.result() for collector in collectors.values()]
        failed = next((result.error for result in results if result.error), None)
        if failed:
            raise UnsupportedError(f"the engine failed during the measurement: {failed}")
        full = full_decodes(steps, len(prompts))
        return Run(
            [result.token_ids for result in results],
            [first[name] - start for name in collectors],
            len(prompts) * len(full),
            sum(step.seconds for step in full),
            steps,
        )

    def counted(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> Run:
        """As `run`, with the experts of each step counted; its times mean nothing."""
        counter = ExpertCounter()
        self._runner.counter = counter
        try:
            with counter.attached(self._model):
                return self.run(prompts, num_tokens)
        finally:
            self._runner.counter = None

    def _drive(self, collectors: dict[str, Collector]) -> tuple[list[Step], dict[str, float]]:
        """Step until nothing is left: the steps, and when each request had its first token."""
        steps: list[Step] = []
        first: dict[str, float] = {}
        while self._core.has_work:
            begin = time.perf_counter()
            outputs = self._core.step()
            _feed(collectors, outputs)
            end = time.perf_counter()
            step, self._runner.last = self._runner.last, None
            if step is not None:
                step.begin, step.end = begin, end
                steps.append(step)
            for output in outputs:
                first.setdefault(output.request_id, end)
        return steps, first


def full_decodes(steps: Sequence[Step], num_seqs: int) -> list[Step]:
    """The steps in which all of `num_seqs` sequences decoded and nothing else ran. Raises `UsageError` without any."""
    full = [step for step in steps if step.num_decodes == step.num_seqs == num_seqs]
    if not full:
        raise UsageError(
            f"no step decodes all {num_seqs} sequences at once: the first ends before the last has its first token",
            hint="raise --output-tokens or lower --prompt-tokens",
        )
    return full


def _feed(collectors: dict[str, Collector], outputs: Sequence[EngineOutput]) -> None:
    for output in outputs:
        collectors[output.request_id].feed(output)
