"""A contract file's text."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence

from k3hal.dispatch.contracts import SCHEMA, Library, entries_of

_WIDTH = 120
_SHARED = ("versions", "read_in", "source")


def library_text(library: Library) -> str:
    """TOML that `parse_library` reads back as the same: what most records share stands once, at the top."""
    counts = {key: Counter(getattr(record, key) for record in library.records) for key in _SHARED}
    shared = {key: count.most_common(1)[0][0] for key, count in counts.items()}
    head = {"schema": SCHEMA, "package": library.package, **shared, "load": library.load, "note": library.note}
    lines = [f"{key} = {_string(value)}" for key, value in head.items() if value or key == "versions"]
    for record in library.records:
        lines += ["", "[[function]]", f"name = {_string(f'{record.module}:{record.name}')}"]
        own = {key: getattr(record, key) for key in _SHARED if getattr(record, key) != shared[key]}
        lines += [f"{key} = {_string(value)}" for key, value in own.items()]
        if record.note:
            lines.append(f"note = {_string(record.note)}")
        lines += _array("parameters", entries_of(record.parameters))
    return "\n".join(lines) + "\n"


def _string(text: str) -> str:
    """A basic string: what JSON escapes, TOML reads alike."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _array(name: str, values: Sequence[str]) -> Iterator[str]:
    shown = [_string(value) for value in values]
    line = f"{name} = [{', '.join(shown)}]"
    if len(line) <= _WIDTH:
        yield line
        return
    yield f"{name} = ["
    row = "   "
    for value in shown:
        if len(row) + len(value) + 2 > _WIDTH:
            yield row
            row = "   "
        row += f" {value},"
    yield row
    yield "]"
