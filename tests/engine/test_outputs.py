"""How increments become text, whatever their size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from k3hal.engine.interface import EngineOutput, TokenLogprob
from k3hal.engine.outputs import Collector, CompletionOutput
from k3hal.sampling_params import SamplingParams
from k3hal.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(synthetic_dir: Path) -> Tokenizer:
    return Tokenizer.from_dir(synthetic_dir)


def collect(
    tokenizer: Tokenizer, ids: list[int], cut: int, params: SamplingParams, **last: Any
) -> tuple[CompletionOutput, bool]:
    """Feed `ids` in increments of `cut`, the last with the end; the result, and whether it stopped early."""
    collector = Collector(0, tokenizer, params)
    for start in range(0, len(ids), cut):
        piece = tuple(ids[start : start + cut])
        end = {"finish_reason": "length", **last} if start + cut >= len(ids) else {}
        logprobs = tuple(TokenLogprob(t, -1.0) for t in piece) if params.logprobs is not None else None
        collector.feed(EngineOutput("r", piece, logprobs, **end))
    return collector.result(), collector.stopped_early


@pytest.mark.parametrize("cut", [1, 2, 3, 100])
@pytest.mark.parametrize(("include", "text"), [(False, "grüß "), (True, "grüß Gott")])
def test_a_stop_string_is_found_in_any_increments(tokenizer: Tokenizer, cut: int, include: bool, text: str) -> None:
    ids = tokenizer.encode_ordinary("grüß Gott, wie geht es?")
    params = SamplingParams(stop=("Gott", "wie"), include_stop_str_in_output=include, logprobs=0, max_tokens=100)
    result, early = collect(tokenizer, ids, cut, params)
    assert (result.text, result.finish_reason, result.stop_reason) == (text, "stop", "Gott")
    assert tokenizer.decode(result.token_ids).startswith("grüß Gott")
    assert result.logprobs is not None
    assert [p.token_id for p in result.logprobs] == result.token_ids
    assert early == (cut < len(ids))


@pytest.mark.parametrize("cut", [1, 3])
def test_stop_strings_wait_for_min_tokens(tokenizer: Tokenizer, cut: int) -> None:
    ids = tokenizer.encode_ordinary("aXbXc")
    assert len(ids) == 5
    result, _ = collect(tokenizer, ids, cut, SamplingParams(stop=("X",), min_tokens=2, max_tokens=9))
    assert (result.text, result.stop_reason) == ("aXb", "X")


def test_a_held_back_start_of_a_stop_string_is_released_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_ordinary("abc")
    result, early = collect(tokenizer, ids, 1, SamplingParams(stop=("cd",)))
    assert (result.text, result.finish_reason, early) == ("abc", "length", False)


def test_a_character_cut_off_by_the_end_is_replaced(tokenizer: Tokenizer) -> None:
    ids = [tokenizer.encode_ordinary("a")[0], 0xE2]
    byte_ids = {tokenizer.token_bytes(i): i for i in range(tokenizer.special_base)}
    ids[1] = byte_ids[b"\xe2"]
    assert collect(tokenizer, ids, 1, SamplingParams())[0].text == "a\ufffd"


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "abc")])
def test_a_matched_stop_id_counts_as_a_token_but_not_as_text(tokenizer: Tokenizer, include: bool, text: str) -> None:
    ids = [tokenizer.encode_ordinary(c)[0] for c in "abc"]
    params = SamplingParams(stop_token_ids=(ids[2],), include_stop_str_in_output=include)
    result, _ = collect(tokenizer, ids, 1, params, finish_reason="stop", stop_reason=ids[2])
    assert (result.text, result.token_ids, result.stop_reason) == (text, ids, ids[2])


def test_an_error_is_handed_on(tokenizer: Tokenizer) -> None:
    collector = Collector(2, tokenizer, SamplingParams())
    collector.feed(EngineOutput("r", (), finish_reason="error", error="device lost"))
    result = collector.result()
    assert (result.index, result.finish_reason, result.error) == (2, "error", "device lost")
