"""The tokenizer vLLM gets and what it renders, without vLLM."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import xgrammar
from hypothesis import given
from hypothesis import strategies as st

from k3hal.errors import CheckpointError, RequestError
from k3hal.model.synthetic_vocab import synthetic_ranks
from k3hal.serve.chat_prompt import render_chat
from k3hal.tokenizer import Tokenizer
from k3hal.vllm.chat import ChatRequest, render
from k3hal.vllm.tokenizer import K3Tokenizer, choose_tokenizer_mode

K3 = Tokenizer(synthetic_ranks())
TOKENIZER = K3Tokenizer(K3)
MARKUP = ["<|open|>", "<|sep|>", "<|close|>", "<|end_of_msg|>", "[EOS]", "<|reserved_token_377|>"]
USER = {"role": "user", "content": "hi"}


def test_every_vector_is_rendered(shared_data: Callable[[str], Path]) -> None:
    tokenizer = K3Tokenizer.from_pretrained(shared_data("tiktoken.model").parent)
    for vector in json.loads(shared_data("request_vectors.json").read_text()):
        asked = vector["input"]
        template = {name: asked[name] for name in ("thinking", "thinking_effort") if name in asked}
        fields = {name: asked[name] for name in ("tools", "tool_choice", "response_format") if name in asked}
        assert tokenizer.apply_chat_template(asked["messages"], tokenize=True, **fields, **template) == vector["ids"]
        assert tokenizer.apply_chat_template(asked["messages"], **fields, **template) == vector["text"]


@given(st.lists(st.one_of(st.text(max_size=12), st.sampled_from(MARKUP)), max_size=6))
def test_text_and_ids_and_tokens_go_round(pieces: list[str]) -> None:
    text = "".join(pieces).encode("utf-8", "ignore").decode()
    ids = TOKENIZER.encode(text)
    tokens = TOKENIZER.convert_ids_to_tokens(ids)
    assert TOKENIZER.decode(ids) == TOKENIZER.convert_tokens_to_string(tokens) == text
    assert TOKENIZER.convert_tokens_to_ids(tokens) == ids
    named = text.count("<|sep|>")
    assert ids.count(K3.special("<|sep|>")) == named
    # One token at a time, as vLLM decodes them, a character in pieces is not shown before it is whole.
    assert all(len(TOKENIZER.convert_ids_to_tokens([i])[0]) == len(K3.token_bytes(i)) for i in ids)


def test_what_is_skipped_is_not_what_the_parsers_read() -> None:
    ids = [*(K3.special(name) for name in MARKUP[:5]), *K3.encode_ordinary("x")]
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == "<|open|><|sep|><|close|>x"
    assert TOKENIZER.convert_ids_to_tokens(ids, skip_special_tokens=True) == ["<|open|>", "<|sep|>", "<|close|>", "x"]
    assert set(TOKENIZER.all_special_ids).isdisjoint(ids[:3]) and set(ids[3:5]) <= set(TOKENIZER.all_special_ids)


def test_the_vocabulary_has_every_id_once() -> None:
    vocabulary = TOKENIZER.get_vocab()
    assert sorted(vocabulary.values()) == list(range(K3.vocab_size)) and len(TOKENIZER) == K3.vocab_size
    assert TOKENIZER.max_token_id == K3.vocab_size - 1
    assert TOKENIZER.get_added_vocab().items() <= vocabulary.items() and len(TOKENIZER.get_added_vocab()) == 256
    assert vocabulary["Ġ"] == K3.encode_ordinary(" ")[0] and vocabulary["[EOS]"] == TOKENIZER.eos_token_id
    assert TOKENIZER.convert_tokens_to_ids("no such token") == K3.special("[UNK]")


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (lambda: TOKENIZER.encode("a<|sep|>\ud800"), "half a surrogate pair"),
        (lambda: TOKENIZER(["a", "\udfff"]), "half a surrogate pair"),
        (lambda: TOKENIZER.decode([1, K3.vocab_size]), "outside the vocabulary"),
        (lambda: TOKENIZER.decode(-1), "outside the vocabulary"),
        (lambda: TOKENIZER.convert_ids_to_tokens([10**9]), "outside the vocabulary"),
    ],
)
def test_what_is_no_text_is_the_requests_fault(ask: Callable[[], Any], says: str) -> None:
    """vLLM answers 400 to a `ValueError`, and 500 to an error it does not know."""
    with pytest.raises(ValueError, match=says) as refused:
        ask()
    assert isinstance(refused.value, RequestError)


@pytest.mark.parametrize(("side", "kept"), [("left", "ef"), ("right", "ab")])
def test_truncation_keeps_an_end(side: str, kept: str) -> None:
    tokenizer = K3Tokenizer(K3, truncation_side=side)
    assert tokenizer.decode(tokenizer.encode("a1b2c3d4e5f6"[::2], truncation=True, max_length=2)) == kept
    assert len(tokenizer.encode("abcdef", max_length=2)) == 6


def test_a_batch_and_a_text_are_tokenized_alike() -> None:
    both = TOKENIZER(["a b", "<|sep|>"])
    assert both["input_ids"] == [TOKENIZER("a b")["input_ids"], [K3.special("<|sep|>")]]
    assert [len(row) for row in both["attention_mask"]] == [len(row) for row in both["input_ids"]]
    with pytest.raises(CheckpointError, match="not a pair"):
        TOKENIZER("a", "b")


def test_it_goes_to_other_processes() -> None:
    for other in (pickle.loads(pickle.dumps(TOKENIZER)), copy.deepcopy(TOKENIZER)):
        assert other.encode("x<|sep|>é") == TOKENIZER.encode("x<|sep|>é")


def test_grammars_see_the_bytes_of_every_token() -> None:
    info = xgrammar.TokenizerInfo.from_huggingface(TOKENIZER, vocab_size=K3.vocab_size)  # pyright: ignore[reportArgumentType]
    assert info.vocab_type == xgrammar.VocabType.BYTE_LEVEL and info.stop_token_ids == [TOKENIZER.eos_token_id]
    assert info.decoded_vocab == [K3.token_bytes(i) for i in range(K3.vocab_size)]
    added = TOKENIZER.added_tokens_decoder
    assert all(token.special for token in added.values()) and added[K3.special("<|sep|>")].content == "<|sep|>"


def test_a_damaged_vocabulary_is_refused_by_line(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot read the tokenizer"):
        K3Tokenizer.from_pretrained(tmp_path)
    (tmp_path / "tiktoken.model").write_text("!!! 0\n")
    with pytest.raises(CheckpointError, match="line 1"):
        K3Tokenizer.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("mode", "files", "chosen"),
    [
        ("auto", ["tiktoken.model"], "kimi_k3"),
        ("hf", ["tiktoken.model"], "kimi_k3"),
        ("slow", ["tiktoken.model"], "slow"),
        ("auto", ["tiktoken.model", "tokenizer_config.json"], "auto"),
        ("auto", ["tokenizer.json"], "auto"),
    ],
)
def test_only_a_bare_vocabulary_changes_the_mode(tmp_path: Path, mode: str, files: list[str], chosen: str) -> None:
    for name in files:
        (tmp_path / name).touch()
    config = SimpleNamespace(tokenizer_mode=mode, tokenizer=str(tmp_path))
    choose_tokenizer_mode(config)
    assert config.tokenizer_mode == chosen


class Model:
    """Stands for a pydantic model of vLLM's."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self.fields = fields

    def model_dump(self, **how: Any) -> dict[str, Any]:
        assert how == {"mode": "json", "by_alias": True, "exclude_none": True}
        return self.fields


def test_what_vllm_adds_to_a_request_is_taken_away() -> None:
    """Its models instead of JSON, nulls that nobody wrote, and template arguments that mean nothing to K3."""
    function = {"name": "f", "parameters": {"type": "object"}}
    ours = {"messages": [USER], "tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    given = ChatRequest(
        [Model(USER)],
        [{"type": "function", "function": {**function, "description": None}}],
        "required",
        Model({"type": "text"}),
        {"add_generation_prompt": True, "continue_final_message": False, "documents": None, "tokenize": False},
    )
    assert render(given).segments == render_chat(ours).segments


def test_a_final_message_is_continued() -> None:
    answer = {"role": "assistant", "content": "So"}
    given = ChatRequest([USER, answer], template={"continue_final_message": True, "add_generation_prompt": False})
    assert render(given).segments == render_chat({"messages": [USER, {**answer, "partial": True}]}).segments


@pytest.mark.parametrize(
    ("messages", "template", "param"),
    [
        ([USER], {"chat_template": "{{ x }}"}, "chat_template"),
        ([USER], {"add_generation_prompt": False}, "add_generation_prompt"),
        ([USER], {"thinking_effort": "medium"}, "chat_template_kwargs.thinking_effort"),
        ([USER], {"continue_final_message": True}, "messages[0].partial"),
        ([], {"continue_final_message": True}, "messages"),
        (["hi"], {}, "messages[0]"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], {}, None),
    ],
)
def test_a_request_that_cannot_be_rendered_is_refused_by_field(
    messages: list[Any], template: dict[str, Any], param: str | None
) -> None:
    with pytest.raises(RequestError) as refused:
        render(ChatRequest(messages, template=template))
    assert param is None or refused.value.param == param
