"""The server's log: lines of text or of JSON, without what users write."""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime
from typing import Any, Literal

import orjson

FIELDS = "k3hal_fields"
"""The attribute of a log record that holds its structured part."""


class JsonLines(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, FIELDS, {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str, option=orjson.OPT_NON_STR_KEYS).decode()


class TextLines(logging.Formatter):
    """Time, level and message, then the fields as `name=value`."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        fields = getattr(record, FIELDS, {})
        first, *rest = text.split("\n", 1)
        return "\n".join([" ".join([first, *(f"{name}={_shown(value)}" for name, value in fields.items())]), *rest])


def configure_logs(form: Literal["text", "json"], level: str) -> None:
    """Send the server's log and uvicorn's to stderr, from `level` on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    for name in ("k3hal", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(level.upper())
        logger.propagate = False


def _shown(value: Any) -> str:
    """A value on one line; what could be taken for another field is quoted."""
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    plain = text.isprintable() and not set(text) & set(' "=')
    return text if plain and text else orjson.dumps(text).decode()
