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
    json.dump({"schema": schema, **payload}, sys.stdout, ensure_ascii=False, indent=2, allow_nan=False)
    sys.stdout.write("\n")
