"""The synthetic vocabulary is the pinned one, byte for byte."""

import hashlib

from k3hal.model.synthetic_vocab import synthetic_ranks, synthetic_vocab_bytes


def test_bytes_are_pinned():
    data = synthetic_vocab_bytes()
    assert len(data) == 3503
    assert hashlib.sha256(data).hexdigest() == "3f170b0f64afac52fcfb8805b684ec04f7e3498c081384db33e22fa22ea5475f"


def test_every_byte_and_markup_word_is_one_token():
    ranks = synthetic_ranks()
    assert len(ranks) == len(set(ranks)) == 369
    assert {len(token) for token in ranks[:256]} == {1}
    ids = {token: rank for rank, token in enumerate(ranks)}
    assert [ids[w] for w in (b"message", b" role", b'="', b"user", b"assistant", b"system", b"think", b"response")] == [
        261, 265, 266, 269, 277, 282, 289, 296,
    ]  # fmt: skip
