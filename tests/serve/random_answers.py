"""Answers that a constraint allows, put together at random: what a model without any sense would say."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import numpy as np

from k3hal.engine.interface import Constraint, EngineOutput
from k3hal.model.synthetic_vocab import synthetic_ranks
from k3hal.sampling_params import SamplingParams
from k3hal.serve.chat_choice import ChatChoice, ChatMessage
from k3hal.serve.chat_prompt import ChatPrompt, render_chat
from k3hal.serve.grammar.compiler import Constraints
from k3hal.tokenizer import Tokenizer

TOKENIZER = Tokenizer(synthetic_ranks())
PADDED = TOKENIZER.vocab_size + 15
"""A model's vocabulary, which exceeds the tokenizer's and is no multiple of 32."""
ENDS = frozenset(TOKENIZER.encode_ordinary(char)[0] for char in '"]}')
CONSTRAINTS = Constraints(TOKENIZER, PADDED)
USER = {"role": "user", "content": "hi"}


def prompt_of(**body) -> ChatPrompt:
    return render_chat({"messages": [USER], "thinking": False, **body})


def constraint_of(prompt: ChatPrompt) -> Constraint:
    constraint = CONSTRAINTS.constraint(prompt)
    assert constraint is not None
    return constraint


def allowed_after(constraint: Constraint, ids: list[int]) -> list[int]:
    """The tokens that may follow `ids`."""
    matcher = constraint.matcher()
    for token in ids:
        matcher.accept(token)
    mask = np.zeros(-(-PADDED // 32), np.int32)
    if not matcher.fill(mask):
        return list(range(PADDED))
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:PADDED]).tolist()


def random_answer(constraint: Constraint, seed: int, limit: int = 800) -> list[int] | None:
    """A whole answer, its end token last; None if it has none after `limit` tokens. What ends something comes often."""
    dice = random.Random(seed)
    matcher = constraint.matcher()
    mask = np.zeros(-(-PADDED // 32), np.int32)
    ids: list[int] = []
    while len(ids) < limit:
        assert matcher.fill(mask)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:PADDED]).tolist()
        assert allowed, f"nothing may follow {TOKENIZER.decode(ids)!r}"
        assert max(allowed) < TOKENIZER.vocab_size
        ending = [token for token in allowed if TOKENIZER.is_special(token) or token in ENDS]
        token = dice.choice(ending if ending and dice.random() < 0.25 else allowed)
        matcher.accept(token)
        ids.append(token)
        if token in TOKENIZER.eos_ids:
            return ids
    return None


def message_of(prompt: ChatPrompt, ids: list[int]) -> tuple[dict, str | None]:
    """The message a client gets for those tokens, and the finish reason; nothing had to be recovered but `think`."""
    choice, message = ChatChoice(TOKENIZER, prompt, SamplingParams(), reasoning=True), ChatMessage()
    message.add(choice.feed(EngineOutput("", tuple(ids), finish_reason="stop")))
    assert set(choice.parser.recoveries) <= {"unclosed_think"}
    return message.fields(choice.complete_calls), choice.finish_reason


def response_format(schema, **fields):
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "r", "schema": schema, **fields}}}


def function(name="f", schema=None, **fields):
    given = {} if schema is None else {"parameters": schema}
    return {"type": "function", "function": {"name": name, **given, **fields}}


def named(name):
    return {"type": "function", "function": {"name": name}}


def whatever(seeds, **body):
    """Messages put together at random within the constraint of a request; those that come to no end are left out."""
    prompt = prompt_of(**body)
    constraint = constraint_of(prompt)
    return [message_of(prompt, ids) for ids in (random_answer(constraint, seed) for seed in seeds) if ids]


def answers(seeds: Iterable[int] = range(6), **body: Any):
    found = whatever(seeds, **body)
    assert found, "no answer came to an end"
    return found
