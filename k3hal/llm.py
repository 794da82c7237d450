"""The Python API: a model in this process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from k3hal.debug.arm import armed
from k3hal.dispatch.words import nearest
from k3hal.engine.build import BuiltEngine, build_engine
from k3hal.engine.interface import Constraint, EngineOutput, EngineRequest
from k3hal.engine.outputs import Collector, CompletionOutput, RequestOutput
from k3hal.engine.prompts import params_for_each, read_prompts
from k3hal.engine.scoring import score
from k3hal.errors import UsageError
from k3hal.sampling_params import SamplingParams

if TYPE_CHECKING:
    import torch

    from k3hal.dispatch.plan import DispatchPlan
    from k3hal.serve.chat_choice import ChatChoice, ChatMessage
    from k3hal.serve.grammar.compiler import Constraints
    from k3hal.tokenizer import Tokenizer

Prompt = str | Sequence[int]


class LLM:
    """A loaded model. Synchronous and for one thread; see docs/python.md.

    `model` is a checkpoint directory (None: the built-in default), `ops` provider overrides, `plan` a saved dispatch
    plan; `options` are those of `EngineOptions`. Raises a `K3HALError` when the model cannot be loaded here.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        device: str = "auto",
        dtype: str = "auto",
        ops: str | None = None,
        plan: str | Path | None = None,
        **options: Any,
    ) -> None:
        name = None if model is None else str(model)
        self._built: BuiltEngine | None = None
        self._calls = 0
        self._constraints: Constraints | None = None
        with armed(os.environ):
            self._built = build_engine(name, device=device, dtype=dtype, ops=ops, plan=plan, **options)

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Continue each prompt (text, or token ids); outputs in the prompts' order.

        `params` is one for all or one for each. Every prompt is checked before any is run: raises `RequestError`.
        """
        ids = [self._encode(prompt) for prompt in read_prompts(prompts)]
        each = params_for_each(params, len(ids))
        collectors = [[Collector(i, self._engine.tokenizer, p) for i in range(p.n)] for p in each]
        self._run(ids, each, lambda prompt, index: collectors[prompt][index])
        return [
            RequestOutput(prompt, [c.result() for c in group], max(c.num_cached_tokens for c in group))
            for prompt, group in zip(ids, collectors, strict=True)
        ]

    def chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None, **render_options: Any
    ) -> RequestOutput:
        """Answer a conversation. `render_options` are the fields of a chat request that shape its prompt.

        An output's `text` is the answer, `reasoning` what was thought before it, `tool_calls` the calls as the API
        gives them. Without `params` it runs to its own end.
        """
        from k3hal.serve.chat_choice import ChatChoice, ChatMessage
        from k3hal.serve.chat_prompt import RENDER_FIELDS, render_chat
        from k3hal.serve.grammar.compiler import Constraints

        for name in render_options:
            if name not in RENDER_FIELDS:
                raise UsageError(f"unknown render option {name!r}", hint=nearest(name, RENDER_FIELDS))
        prompt = render_chat({"messages": list(messages), **render_options})
        ids = prompt.ids(self._engine.tokenizer)
        asked = params_for_each(params or SamplingParams(max_tokens=None), 1)[0]
        tokenizer = self._engine.tokenizer
        if self._constraints is None:
            self._constraints = Constraints(tokenizer, self._engine.engine.info.vocab_size)
        constraint = self._constraints.constraint(prompt)
        choices = [
            _ChatCollector(i, ChatChoice(tokenizer, prompt, asked, reasoning=True), ChatMessage())
            for i in range(asked.n)
        ]
        self._run([ids], [asked], lambda _, index: choices[index], constraint)
        return RequestOutput(ids, [c.result() for c in choices], max(c.num_cached_tokens for c in choices))

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """The model's raw predictions, float32 [T, vocab] on the CPU: row t is the distribution of token t + 1."""
        return score(self._engine.engine.core, self._engine.runner, token_ids)

    @property
    def plan(self) -> DispatchPlan:
        """Which provider runs each operator, and why."""
        return self._engine.plan

    @property
    def tokenizer(self) -> Tokenizer:
        return self._engine.tokenizer

    @property
    def max_model_len(self) -> int:
        """Most tokens of one sequence, prompt and output together."""
        return self._engine.engine.info.max_model_len

    def close(self) -> None:
        """Release model and cache. A second call does nothing; any other call afterwards raises `UsageError`."""
        if self._built is not None:
            self._built.engine.close()
            self._built = None
        if self._constraints is not None:
            self._constraints.close()
            self._constraints = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _engine(self) -> BuiltEngine:
        if self._built is None:
            raise UsageError("this LLM is closed")
        return self._built

    def _encode(self, prompt: str | list[int]) -> list[int]:
        """Token ids of a prompt. Text never becomes a special token, whatever it spells."""
        if isinstance(prompt, str):
            return self._engine.tokenizer.encode_ordinary(prompt)
        return prompt

    def _run(
        self,
        prompts: list[list[int]],
        params: list[SamplingParams],
        receiver: Callable[[int, int], Collector | _ChatCollector],
        constraint: Constraint | None = None,
    ) -> None:
        """Run every continuation to its end; `receiver(prompt, index)` takes its increments."""
        core = self._engine.engine.core
        self._calls += 1
        receivers = {}
        checked = []
        for number, (ids, asked) in enumerate(zip(prompts, params, strict=True)):
            for index in range(asked.n):
                name = f"{self._calls}-{number}-{index}"
                request = EngineRequest(name, ids, asked.continuation(index), constraint=constraint)
                checked.append(core.check(request))
                receivers[request.request_id] = receiver(number, index)
        try:
            for request in checked:
                core.enqueue(request)
            with _progress(len(checked)) as advance:
                while core.has_work:
                    core.abort(_feed(receivers, core.step(), advance))
        finally:
            core.abort_all()


class _ChatCollector:
    """One answer of a chat, from increments to a `CompletionOutput`."""

    def __init__(self, index: int, choice: ChatChoice, message: ChatMessage) -> None:
        self._index = index
        self._choice = choice
        self._message = message
        self._error: str | None = None

    @property
    def done(self) -> bool:
        return self._choice.finish_reason is not None or self._error is not None

    @property
    def stopped_early(self) -> bool:
        return self._choice.stopped_early

    @property
    def num_cached_tokens(self) -> int:
        return self._choice.cached_tokens

    def feed(self, output: EngineOutput) -> None:
        if output.finish_reason == "error":
            self._error = output.error or "the engine failed"
        elif not self.done:
            self._message.add(self._choice.feed(output))

    def result(self) -> CompletionOutput:
        fields = self._message.fields(self._choice.complete_calls)
        return CompletionOutput(
            index=self._index,
            text=fields["content"] or "",
            token_ids=self._choice.token_ids,
            finish_reason="error" if self._error else str(self._choice.finish_reason),
            stop_reason=self._choice.stop_reason,
            logprobs=self._message.logprobs or None,
            error=self._error,
            reasoning=fields.get("reasoning_content"),
            tool_calls=fields.get("tool_calls", []),
        )


def _feed(
    receivers: Mapping[str, Collector | _ChatCollector], outputs: Sequence[EngineOutput], advance: Callable[[], None]
) -> list[str]:
    """Hand a step's increments out; the ids of requests that ended before the engine knew."""
    early = []
    for output in outputs:
        receiver = receivers[output.request_id]
        receiver.feed(output)
        if receiver.done:
            advance()
            if receiver.stopped_early:
                early.append(output.request_id)
    return early


@contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    """What to call for each sequence that ends: a bar on standard error, for a person who waits for several."""
    if total < 2 or not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("generating", total=total)
        yield lambda: bar.advance(task)
