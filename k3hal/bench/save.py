"""Keeps reports: as JSON, and as tables between the marks of a Markdown page."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from k3hal.bench.cache.tables import cache_tables
from k3hal.bench.modelled import SCHEMA as MODELLED
from k3hal.bench.modelled import modelled_tables
from k3hal.bench.operators import SCHEMA, operator_tables
from k3hal.bench.serve.tables import serve_tables
from k3hal.bench.slice_tables import slice_tables
from k3hal.bench.tables import Table, dispatch_tables, dump_tables, engine_tables
from k3hal.errors import InputError, UsageError

_TABLES = {
    "k3hal.bench_engine/1": engine_tables,
    "k3hal.bench_dispatch/1": dispatch_tables,
    "k3hal.bench_dump/1": dump_tables,
    "k3hal.bench_cache/1": cache_tables,
    "k3hal.bench_serve/1": serve_tables,
    "k3hal.bench_slice/1": slice_tables,
    SCHEMA: operator_tables,
    MODELLED: modelled_tables,
}


def tables_of(report: Mapping[str, Any]) -> list[Table]:
    """The tables of a report of any kind, as `--json` prints it. Raises `InputError` for a foreign schema."""
    schema = report.get("schema")
    if schema not in _TABLES:
        raise InputError(f"schema {schema!r} is no benchmark report", hint=f"expected {' or '.join(_TABLES)}")
    return _TABLES[schema](report)


def check_targets(targets: Sequence[Path]) -> None:
    """Raise `UsageError` for a file `save` would not write, before minutes are spent measuring."""
    for target in targets:
        if target.suffix not in (".json", ".md"):
            raise UsageError(
                f"--save {target}: not a .json or .md file", hint="the report is JSON, the tables are Markdown"
            )
        if not target.parent.is_dir():
            raise UsageError(f"--save {target}: {target.parent} is not a directory")


def save(report: Mapping[str, Any], target: Path) -> None:
    """Write the report to FILE.json, or put its tables in place of those of the same names in FILE.md."""
    if target.suffix == ".json":
        target.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        return
    page = target.read_text(encoding="utf-8") if target.exists() else ""
    for table in tables_of(report):
        page = with_table(page, table)
    target.write_text(page, encoding="utf-8")


def with_table(page: str, table: Table) -> str:
    """The page with the table between its marks; a page without them gets both at its end."""
    block = f"<!-- table: {table.name} -->\n\n{table.markdown()}\n\n<!-- end -->"
    pattern = re.compile(rf"<!-- table: {re.escape(table.name)} -->.*?<!-- end -->", re.DOTALL)
    if pattern.search(page):
        return pattern.sub(lambda _: block, page)
    return f"{page.rstrip()}\n\n{block}\n".lstrip()
