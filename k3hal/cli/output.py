"""What verbs print on stdout under `--json`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

ERROR_SCHEMA = "k3hal.error/1"


def print_json(schema: str, payload: Mapping[str, Any]) -> None:
    """Print one JSON object with `schema` (`k3hal.<name>/<major>`) as its first key.

    A verb prints its JSON once, when it has all of it, so that stdout is either one document or empty.
    """
    document = {"schema": schema, **payload}
    text = json.dumps(document, ensure_ascii=False, indent=2, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # a name that is not UTF-8 is shown by escapes
        text = json.dumps(document, indent=2, allow_nan=False)
    sys.stdout.write(text + "\n")
