"""XTML, the prompt markup of K3: segments that become token ids one by one, never through joined text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from k3hal.tokenizer import CLOSE, END_OF_MSG, OPEN, SEP, Tokenizer

Attributes = tuple[tuple[str, str], ...]


class Segment(NamedTuple):
    """A piece of prompt. Markup is exactly one control token; anything else is encoded with specials disabled."""

    text: str
    markup: bool = False


def open_tag(tag: str, *attributes: tuple[str, str]) -> Iterator[Segment]:
    """`<|open|>tag key="value"<|sep|>`; the four pieces of an attribute are segments of their own."""
    yield Segment(OPEN, True)
    yield Segment(tag)
    for key, value in attributes:
        yield Segment(f" {key}")
        yield Segment('="')
        yield Segment(escape(value))
        yield Segment('"')
    yield Segment(SEP, True)


def close_tag(tag: str) -> Iterator[Segment]:
    yield Segment(CLOSE, True)
    yield Segment(tag)
    yield Segment(SEP, True)


def element(tag: str, text: str, *attributes: tuple[str, str]) -> Iterator[Segment]:
    """An element whose body is unescaped text."""
    yield from open_tag(tag, *attributes)
    yield Segment(text)
    yield from close_tag(tag)


def message(attributes: Attributes, body: Iterable[Segment]) -> Iterator[Segment]:
    """A whole message, its end token included."""
    yield from open_tag("message", *attributes)
    yield from body
    yield from close_tag("message")
    yield Segment(END_OF_MSG, True)


def escape(value: str) -> str:
    """An attribute value as written between the quotes."""
    return value.replace("&", "&amp;").replace('"', "&quot;")


def unescape(value: str) -> str:
    return value.replace("&quot;", '"').replace("&amp;", "&")


def encode(segments: Iterable[Segment], tokenizer: Tokenizer) -> list[int]:
    """Token ids, each segment encoded alone, so that no merge crosses a boundary and no text becomes structure."""
    ids: list[int] = []
    for text, markup in segments:
        if markup:
            ids.append(tokenizer.special(text))
        elif text:
            ids.extend(tokenizer.encode_ordinary(text))
    return ids


def to_text(segments: Iterable[Segment]) -> str:
    """The prompt as people read it; it must never be encoded again."""
    return "".join(segment.text for segment in segments)
