"""The tokenizer: ids, round trips, pre-cutting, and every way its file can be malformed."""

import base64
import hashlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3hal.errors import CheckpointError, RequestError
from k3hal.model.synthetic_vocab import synthetic_ranks, synthetic_vocab_bytes
from k3hal.tokenizer import Tokenizer

SYNTHETIC = Tokenizer(synthetic_ranks())


@pytest.fixture(scope="module")
def real(shared_data):
    return Tokenizer.from_dir(shared_data("tiktoken.model").parent)


def test_special_ids_follow_the_last_rank(synthetic_dir):
    tokenizer = Tokenizer.from_dir(synthetic_dir)
    assert tokenizer.vocab_size == 369 + 256
    names = ("[BOS]", "[EOS]", "<|end_of_msg|>", "<|open|>", "<|close|>", "<|sep|>", "[PAD]")
    assert [tokenizer.special(name) for name in names] == [369, 370, 371, 372, 373, 374, 624]
    assert tokenizer.special("<|reserved_token_377|>") == 377
    assert tokenizer.eos_ids == {370, 371}
    with pytest.raises(CheckpointError, match="im_end"):
        tokenizer.special("<|im_end|>")


def test_real_vocabulary(real):
    assert real.vocab_size == 163840
    assert real.special("<|end_of_msg|>") == 163586
    assert real.special("<|media_pad|>") == 163605
    assert real.encode_ordinary("message") == [2778]
    assert real.encode_ordinary("Hi") == [18699]


def test_real_vocabulary_is_the_published_one(shared_data):
    digest = hashlib.sha256(shared_data("tiktoken.model").read_bytes()).hexdigest()
    assert digest == "b6c497a7469b33ced9c38afb1ad6e47f03f5e5dc05f15930799210ec050c5103"


def test_text_that_spells_a_special_stays_text(real):
    text = "<|open|>message<|sep|>[EOS]<|end_of_msg|>"
    ids = real.encode_ordinary(text)
    assert max(ids) < real.special_base
    assert real.decode(ids) == text


def test_long_runs_are_cut_before_the_pattern_runs(real):
    run = "a" * 25_000
    assert real.encode_ordinary(run + "a") == real.encode_ordinary(run) + real.encode_ordinary("a")
    spaces = " " * 25_000
    assert real.encode_ordinary("x" + spaces + "  y") == real.encode_ordinary("x" + spaces) + real.encode_ordinary(
        "  y"
    )
    # U+001C is whitespace to `str.isspace`, so it continues a run of spaces.
    assert real.encode_ordinary(spaces + "\x1c") == real.encode_ordinary(spaces) + real.encode_ordinary("\x1c")


def test_text_is_cut_every_400_000_characters(real):
    text = "ab " * 133_334
    assert real.encode_ordinary(text) == real.encode_ordinary(text[:400_000]) + real.encode_ordinary(text[400_000:])


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_round_trip(text):
    ids = SYNTHETIC.encode_ordinary(text)
    assert SYNTHETIC.decode(ids) == text
    assert all(not SYNTHETIC.is_special(i) for i in ids)


def test_ids_outside_the_vocabulary_are_refused():
    for bad in (-1, 625):
        with pytest.raises(RequestError, match="outside the vocabulary of 625"):
            SYNTHETIC.decode([bad])


def _line(token: bytes, rank: object) -> bytes:
    return base64.b64encode(token) + f" {rank}".encode()


GOOD = synthetic_vocab_bytes().splitlines()


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([*GOOD[:-1], b"!!! 368"], "line 369.*not base64"),
        ([*GOOD[:-1], b"SGVsbG8="], "line 369: expected `base64 rank`"),
        ([*GOOD[:-1], b"SGVsbG8= 368 9"], "line 369: expected"),
        ([*GOOD[:-1], b""], "line 369: expected"),
        ([*GOOD[:-1], b" 368"], "line 369: the token is empty"),
        ([*GOOD[:-1], b"SGVsbG8= -1"], "line 369.*not a rank"),
        ([*GOOD[:-1], b"SGVsbG8= x"], "line 369.*not a rank"),
        ([*GOOD[:-1], _line(b"Hello", 367)], "line 369: rank 367 appears twice"),
        ([*GOOD[:-1], _line(b"Hello", 369)], "line 369: rank 369.*dense"),
        ([*GOOD[:-1], _line(b"null", 368)], "rank 368 appears twice"),
        ([_line(b"zz", 0), *GOOD[1:]], "no token for 1 of the 256 single bytes, first 0x21"),
        ([], "no token for 256"),
        ([b"version https://git-lfs.github.com/spec/v1"], "line 1: .*not base64"),
    ],
)
def test_malformed_files_are_named(tmp_path, lines, message):
    (tmp_path / "tiktoken.model").write_bytes(b"\n".join(lines) + b"\n" if lines else b"")
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.from_dir(tmp_path)


def test_missing_file_says_what_was_expected(tmp_path):
    with pytest.raises(CheckpointError, match=r"tiktoken\.model.*No such file"):
        Tokenizer.from_dir(tmp_path)


def test_a_missing_final_newline_is_fine(tmp_path):
    (tmp_path / "tiktoken.model").write_bytes(b"\n".join(GOOD))
    assert Tokenizer.from_dir(tmp_path).vocab_size == 625


def test_vectors_decode_to_their_text(real, shared_data):
    for vector in json.loads(shared_data("request_vectors.json").read_text()):
        assert real.decode(vector["ids"]) == vector["text"]
