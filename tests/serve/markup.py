"""Outputs of a model, written as text in which a few symbols stand for control tokens."""

from k3hal.model.synthetic_vocab import synthetic_ranks
from k3hal.tokenizer import CLOSE, END_OF_MSG, EOS, OPEN, SEP, Tokenizer

TOKENIZER = Tokenizer(synthetic_ranks())
MARKERS = {"⟦": OPEN, "⟧": CLOSE, "¦": SEP, "∎": END_OF_MSG, "■": EOS}


def ids_of(text):
    """Token ids of text in which ⟦ ⟧ ¦ ∎ ■ stand for the open, close, sep, end-of-message and [EOS] tokens."""
    ids, plain = [], ""
    for char in text:
        if char not in MARKERS:
            plain += char
            continue
        ids += [*TOKENIZER.encode_ordinary(plain), TOKENIZER.special(MARKERS[char])]
        plain = ""
    return ids + TOKENIZER.encode_ordinary(plain)
