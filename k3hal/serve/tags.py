"""Reading the inside of an XTML tag the model wrote."""

from __future__ import annotations

import re
from typing import NamedTuple

from k3hal.serve.xtml import unescape

_NAME = re.compile(r"\s*([A-Za-z_]+)")
_ATTRIBUTE = re.compile(r'([A-Za-z_]+)\s*=\s*"([^"]*)"')
# The model sometimes forgets the separator and the marker between these two.
_TOOLS_THEN_CALL = re.compile(r"\s*tools\s*(?=call\b)")


class Tag(NamedTuple):
    name: str
    attributes: dict[str, str]


def read_tags(header: bytes) -> list[Tag]:
    """The tags of one header, the text between a marker and its separator: one, or `tools` and the `call` run into it.

    Attributes come in any order and spacing; a header without a name gives a tag with an empty one.
    """
    text = header.decode("utf-8", "replace")
    merged = _TOOLS_THEN_CALL.match(text)
    if merged:
        return [Tag("tools", {}), _tag(text[merged.end() :])]
    return [_tag(text)]


def _tag(text: str) -> Tag:
    name = _NAME.match(text)
    if name is None:
        return Tag("", {})
    return Tag(name[1], {key: unescape(value) for key, value in _ATTRIBUTE.findall(text, name.end())})
