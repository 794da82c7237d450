"""Thinking that travels through a client which may not show it: APIs have an opaque field that comes back unchanged."""

from __future__ import annotations

import base64
import binascii

_PREFIX = "k3hal."


def seal(text: str) -> str:
    """`text` as one opaque word. Not a secret: whoever asks for it is the one the text was written for."""
    return _PREFIX + base64.urlsafe_b64encode(text.encode("utf-8", "surrogatepass")).decode()


def unseal(word: object) -> str:
    """What `seal` was given; empty for a word of another server."""
    if not isinstance(word, str) or not word.startswith(_PREFIX):
        return ""
    try:
        return base64.b64decode(word.removeprefix(_PREFIX), altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        return ""
