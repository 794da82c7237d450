"""Fills the page's template: style, scripts and data go inside, so that the file needs nothing beside it."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from k3hal.conform.package import REPORT
from k3hal.conform.page.compact import page_data
from k3hal.conform.page.load import load_report
from k3hal.errors import InputError, UsageError

# In the order in which they are joined: each uses what stands before it.
SCRIPTS = ("dom.js", "data.js", "checks.js", "detail.js", "matrix.js", "sections.js", "main.js")
_MARK = re.compile(r"\{\{(\w+)\}\}")


def write_page(package_dir: Path, out: Path) -> None:
    """Write the report of a conformance package as one HTML file.

    Raises `InputError` for a report that cannot be read or shown, `UsageError` where `out` cannot be written.
    """
    report = load_report(package_dir)
    try:
        text = render(page_data(report))
    except ValueError as error:  # such as 1e999, which JSON allows and no number is
        raise InputError(f"{package_dir / REPORT}: {error}") from error
    try:
        # Only the title can hold what is not text: half a surrogate pair.
        out.write_text(text, encoding="utf-8", errors="xmlcharrefreplace", newline="\n")
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error.strerror or error}") from error


def render(data: Mapping[str, Any]) -> str:
    """The page of `page_data`."""
    script = '"use strict";\n(() => {\n' + "\n".join(_resource(name) for name in SCRIPTS) + "})();\n"
    parts = {
        "policy": _content_policy(style := _resource("page.css"), script),
        "title": html.escape(_title(data)),
        "style": style,
        "data": embedded_json(data),
        "script": script,
    }
    # One pass: a mark inside the data is data.
    return _MARK.sub(lambda mark: parts[mark[1]], _resource("page.html"))


def embedded_json(data: Mapping[str, Any]) -> str:
    """JSON that may stand inside a `script` element: pure ASCII, and no `<`, `>` or `&` that could end it."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _title(data: Mapping[str, Any]) -> str:
    statement, device = data["statement"], data["device"]
    return f"{statement['product']} conformance on {device['title'] or device['device']}"


def _content_policy(style: str, script: str) -> str:
    """Nothing is loaded, and nothing runs but the script of this file: a second lock behind the escaping."""
    return (
        f"default-src 'none'; base-uri 'none'; form-action 'none'; style-src {_sha(style)}; script-src {_sha(script)}"
    )


def _sha(text: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


def _resource(name: str) -> str:
    return (files("k3hal.conform.page") / name).read_text(encoding="utf-8")
