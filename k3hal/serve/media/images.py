"""Images of a prompt: what a part holds, how many tokens it takes, and its place in the markup."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

from k3hal.engine.interface import EngineImage
from k3hal.errors import RequestError
from k3hal.serve.media.headers import Mime, read_header
from k3hal.serve.media.rules import MAX_PIXELS, MediaRules
from k3hal.serve.media.urls import RemoteUrl, is_data, read_data, read_remote
from k3hal.serve.xtml import Segment
from k3hal.tokenizer import MEDIA_BEGIN, MEDIA_CONTENT, MEDIA_END, MEDIA_PAD

PATCH, MERGE = 14, 2
MAX_PATCHES = 65_536
MAX_SIDE = 512 * PATCH
_UNIT = PATCH * MERGE


@dataclass(frozen=True, slots=True)
class Image:
    """An encoded image, its size in pixels and the number of pad tokens that stand for it."""

    data: bytes
    digest: bytes
    mime: Mime
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
    """Collects the images of a request in the order of the prompt.

    `fetched` are those of other servers that are here by now. The others are left in `missing`, by their URL, with the
    field that names them; while there are any, the prompt lacks them and must be rendered again.
    """

    def __init__(self, rules: MediaRules | None = None, fetched: Mapping[RemoteUrl, bytes] | None = None) -> None:
        self._rules = rules or MediaRules()
        self._fetched = fetched or {}
        self._parts = 0
        self.found: list[Image] = []
        self.missing: dict[RemoteUrl, str] = {}

    def segments(self, part: Mapping[str, object], param: str) -> list[Segment]:
        self._parts += 1
        if self._parts > self._rules.max_images:
            most = self._rules.max_images
            raise RequestError(f"{param} is one image too many: a request may have {most}", param=param)
        url, where = _url(part, param)
        if is_data(url):
            data = read_data(url, where, self._rules)
        else:
            remote = read_remote(url, where, self._rules)
            if remote not in self._fetched:
                self.missing.setdefault(remote, where)
                return []
            data = self._fetched[remote]
        image = read_image(data, where)
        self.found.append(image)
        return image.segments()


def _url(part: Mapping[str, object], param: str) -> tuple[str, str]:
    """The URL of an `image_url` or `image` part and the field that has it."""
    kind = str(part["type"])
    source = part.get(kind)
    url = source.get("url") if isinstance(source, Mapping) else source
    where = f"{param}.{kind}"
    if not isinstance(url, str):
        raise RequestError(f"{where} must hold the image's url", param=where)
    return url, where


def read_image(data: bytes, param: str) -> Image:
    """The image that `data` is the file of, whatever it was called. Raises `RequestError` naming `param`."""
    header = read_header(data)
    if header is None or not header.whole or min(header.width, header.height) < 1:
        raise RequestError(f"{param} is no complete PNG, JPEG, GIF or WebP image", param=param)
    mime, width, height, _ = header
    if width * height > MAX_PIXELS:
        raise RequestError(f"{param} has {width}x{height} pixels, more than {MAX_PIXELS} in all", param=param)
    return Image(data, hashlib.sha256(data).digest(), mime, width, height, image_tokens(width, height))


def placed(images: Sequence[Image], ids: Sequence[int], pad: int) -> tuple[EngineImage, ...]:
    """The images of a prompt with the position of each one's first token; `pad` is the id of all of them."""
    out: list[EngineImage] = []
    end = 0
    for image in images:
        at = ids.index(pad, end)
        end = at + image.tokens
        out.append(EngineImage(**asdict(image), position=at))
    return tuple(out)


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
