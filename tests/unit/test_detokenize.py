"""Incremental text equals text decoded at once, and stop strings do not depend on how text is cut."""

from hypothesis import given, settings
from hypothesis import strategies as st

from k3hal.engine.detokenize import IncrementalDetokenizer
from k3hal.engine.stop_strings import StopStrings
from k3hal.model.synthetic_vocab import synthetic_ranks
from k3hal.tokenizer import Tokenizer

TOKENIZER = Tokenizer(synthetic_ranks())
IDS = st.lists(st.integers(0, 368))


@settings(deadline=None)
@given(IDS)
def test_pieces_join_to_the_whole_even_for_invalid_bytes(ids):
    detok = IncrementalDetokenizer(TOKENIZER)
    assert detok.add_all(ids) + detok.flush() == TOKENIZER.decode(ids)


@settings(deadline=None)
@given(st.text(min_size=1))
def test_valid_text_never_shows_a_replacement_character_early(text):
    detok = IncrementalDetokenizer(TOKENIZER)
    shown = ""
    for token_id in TOKENIZER.encode_ordinary(text):
        shown += detok.add(token_id)
        assert text.startswith(shown)
    assert shown == text
    assert detok.flush() == ""


def test_a_flushed_detokenizer_starts_afresh():
    detok = IncrementalDetokenizer(TOKENIZER)
    first, rest = TOKENIZER.encode_ordinary("é")
    assert detok.add(first) == ""
    assert detok.flush() == "\ufffd"
    assert detok.add_all([first, rest]) == "é"


def test_specials_are_skipped_or_shown():
    eos = TOKENIZER.special("[EOS]")
    assert IncrementalDetokenizer(TOKENIZER).add(eos) == ""
    assert IncrementalDetokenizer(TOKENIZER, skip_special=False).add(eos) == "[EOS]"


def test_ids_of_padded_embeddings_have_no_text():
    assert IncrementalDetokenizer(TOKENIZER).add(625) == ""
    assert IncrementalDetokenizer(TOKENIZER, skip_special=False).add(625) == ""


def naive(text, stops, include):
    """Grow the text by one character until it ends with a stop string."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@settings(deadline=None, max_examples=300)
@given(
    st.lists(st.text(alphabet="abc", max_size=4)),
    st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=4),
    st.booleans(),
)
def test_stop_strings_equal_the_naive_search_for_any_chunking(chunks, stops, include):
    matcher = StopStrings(stops, include=include)
    shown = "".join(map(matcher.feed, chunks)) + matcher.flush()
    assert (shown, matcher.matched) == naive("".join(chunks), stops, include)


def test_nothing_is_held_that_cannot_begin_a_stop_string():
    matcher = StopStrings(["</end>"])
    assert matcher.feed("text <") == "text "
    assert matcher.feed("b") == "<b"
    assert matcher.feed("</en") == ""
    assert matcher.feed("d> tail") == ""
    assert matcher.matched == "</end>"
    assert matcher.feed("more") == ""
