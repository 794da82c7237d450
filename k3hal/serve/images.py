"""Images of a prompt: what a part holds, how many tokens it takes, and its place in the markup."""

from __future__ import annotations

import base64
import binascii
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from k3hal.errors import RequestError
from k3hal.serve.image_size import image_size
from k3hal.serve.xtml import Segment
from k3hal.tokenizer import MEDIA_BEGIN, MEDIA_CONTENT, MEDIA_END, MEDIA_PAD

PATCH, MERGE = 14, 2
MAX_PATCHES = 65_536
MAX_SIDE = 512 * PATCH
_DATA_URL = re.compile(r"data:image/[\w.+-]+;base64,", re.ASCII)
_UNIT = PATCH * MERGE


@dataclass(frozen=True, slots=True)
class Image:
    """An encoded image, its size in pixels and the number of pad tokens that stand for it."""

    data: bytes
    width: int
    height: int
    tokens: int

    def segments(self) -> list[Segment]:
        """The image's place in a prompt. The size is text of its own, so that it is encoded like the format's."""
        pads = [Segment(MEDIA_PAD, True)] * self.tokens
        size = Segment(f"image {self.width}x{self.height}")
        return [Segment(MEDIA_BEGIN, True), size, Segment(MEDIA_CONTENT, True), *pads, Segment(MEDIA_END, True)]


class Media(Protocol):
    """What becomes of the image parts of a request."""

    def segments(self, part: Mapping[str, object], param: str) -> list[Segment]:
        """A part's place in the prompt. Raises `RequestError` naming `param`."""
        ...


class NoMedia:
    """Refuses images; `why` ends the sentence."""

    def __init__(self, why: str = "the served model takes text only") -> None:
        self._why = why

    def segments(self, part: Mapping[str, object], param: str) -> list[Segment]:
        raise RequestError(f"{param} is an image, but {self._why}", param=param)


class Images:
    """Collects the images of a request in the order of the prompt."""

    def __init__(self) -> None:
        self.found: list[Image] = []

    def segments(self, part: Mapping[str, object], param: str) -> list[Segment]:
        image = read_image(part, param)
        self.found.append(image)
        return image.segments()


def read_image(part: Mapping[str, object], param: str) -> Image:
    """The image of an `image_url` or `image` part, which must be a base64 `data:` URL. Raises `RequestError`."""
    kind = str(part["type"])
    source = part.get(kind)
    url = source.get("url") if isinstance(source, Mapping) else source
    where = f"{param}.{kind}"
    if not isinstance(url, str):
        raise RequestError(f"{where} must hold the image's url", param=where)
    head = _DATA_URL.match(url)
    if head is None:
        raise RequestError(f"{where} must be a data:image/…;base64, URL, got {url!r:.60}", param=where)
    try:
        data = base64.b64decode(url[head.end() :], validate=True)
    except (binascii.Error, ValueError):
        raise RequestError(f"{where} is not valid base64", param=where) from None
    size = image_size(data)
    if size is None or min(size) < 1:
        raise RequestError(f"{where} is no complete PNG, JPEG, GIF, WebP or BMP image", param=where)
    return Image(data, *size, image_tokens(*size))


def image_tokens(width: int, height: int) -> int:
    """Tokens of an image of that many pixels.

    It is scaled down until its patches and sides are within their limits, and each side rounded up to whole units of
    `MERGE` patches; a unit is one token.
    """
    patches = max(1, width // PATCH) * max(1, height // PATCH)
    scale = min(1.0, math.sqrt(MAX_PATCHES / patches), MAX_SIDE / width, MAX_SIDE / height)

    def units(side: int) -> int:
        return math.ceil(min(max(1, math.floor(side * scale)), MAX_SIDE) / _UNIT)

    return units(width) * units(height)
