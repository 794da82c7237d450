"""Writes or checks README's support table and the levels packaged with the wheel, from the reports in ci/reports.

    python ci/support_table.py --write | --check

A report lies in `ci/reports/<vendor>/<arch>/`, or with a word of the device's name for the arch (`h200` of an NVIDIA
H200), as the package that `k3hal conform run` wrote or in a folder below. It must be of a clean tree and, but for an
emulated machine's, of every sample. With `--check`, a table or levels that are not those of the reports fail;
a provider whose sources have changed since its report is named, and does not.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3hal.conform.environment import is_emulated
from k3hal.conform.package import REPORT, read_report
from k3hal.conform.sources import source_hash
from k3hal.dispatch.registry import Registry, default_registry, operator_names
from k3hal.errors import InputError

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- support table: ci/support_table.py -->", "<!-- end of support table -->"
SCHEMA = "k3hal.evidence/1"
COMMAND = "python ci/support_table.py --write"


@dataclass(frozen=True, slots=True)
class Report:
    """A committed report, and where it lies relative to the repository."""

    place: str
    content: Mapping[str, Any]

    @property
    def machine(self) -> str:
        return f"{self.content['device']['vendor']} {self.content['device']['arch']}"

    @property
    def emulated(self) -> bool:
        return is_emulated(self.content)


def read_reports(folder: Path) -> list[Report]:
    """Every report below `folder`. Raises `InputError` for one that proves nothing or lies in the wrong place."""
    out = []
    for path in sorted(folder.rglob(REPORT)):
        content, place = read_report(path.parent), path.parent.relative_to(folder)
        device = content["device"]
        machine = {device["arch"], *device["title"].lower().split()}
        if place.parts[:1] != (device["vendor"],) or not machine & set(place.parts[1:2]):
            raise InputError(f"{path}: is of {device['vendor']}/{device['arch']}", hint="move it to that folder")
        dirty = any(one["dirty"] for one in [content["statement"], *content["packages"]])
        if dirty or not content["statement"]["commit"]:
            raise InputError(f"{path}: is of sources that no commit holds", hint="commit, then run it again")
        if content["selection"]["quick"] and not is_emulated(content):
            raise InputError(f"{path}: is of the quick subset", hint="run it again without --quick")
        out.append(Report(f"{folder.name}/{place.as_posix()}", content))
    return out


def levels_of(reports: Iterable[Report]) -> dict[str, dict[str, dict[str, str]]]:
    """Operator, provider, arch: the highest level a report proves, E0 left out."""
    levels: dict[str, dict[str, dict[str, str]]] = {}
    for report in reports:
        for one in report.content["providers"]:
            archs = levels.get(one["op"], {}).get(one["provider"], {})
            if one["level"] > archs.get(one["arch"], "E0"):
                levels.setdefault(one["op"], {}).setdefault(one["provider"], {})[one["arch"]] = one["level"]
    return {op: {p: dict(sorted(a.items())) for p, a in sorted(ps.items())} for op, ps in sorted(levels.items())}


def table(reports: Sequence[Report], operators: Sequence[str]) -> str:
    """The table in Markdown, with a line for each report below it."""
    if not reports:
        return "No report is committed yet: every provider is E0, declared.\n"
    machines = sorted({report.machine for report in reports})
    lines = ["| operator | " + " | ".join(machines) + " |", "|---" * (len(machines) + 1) + "|"]
    for op in operators:
        cells = [_cell([r for r in reports if r.machine == machine], op) for machine in machines]
        lines.append(f"| `{op}` | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *(_source(report) for report in reports)]) + "\n"


def _cell(reports: Iterable[Report], op: str) -> str:
    found: dict[str, tuple[str, bool]] = {}
    judged = False
    for report in reports:
        for one in report.content["providers"]:
            judged |= one["op"] == op
            if one["op"] == op and one["levels"]:
                # What a real machine has shown stands before the same of an emulated one.
                old = found.get(one["provider"], ("E0", False))
                found[one["provider"]] = max(old, (one["level"], not report.emulated))
    ranked = sorted(found.items(), key=lambda item: item[1], reverse=True)
    words = [f"{level} `{name}`" + ("" if real else " *emulated*") for name, (level, real) in ranked]
    return ", ".join(words) or ("reference" if judged else "not judged")


def _source(report: Report) -> str:
    said, counts = report.content["statement"], report.content["counts"]
    failed = sum(counts.get(name, 0) for name in ("Fail", "Crash", "Timeout", "Waived"))
    return (
        f"- {report.machine}: [{report.place}](ci/{report.place}/statement.md), {report.content['device']['title']}, "
        f"commit {said['commit'][:12]} of {said['created'][:10]}, {sum(counts.values())} checks, {failed} failed"
        + (", emulated on a CPU" if report.emulated else "")
    )


def changed_since(reports: Iterable[Report], registry: Registry) -> list[str]:
    """A line for every provider with a level whose sources are not those its report is of."""
    now = {(p.op, p.id): source_hash(p) for p in registry.providers}
    lines = []
    for report in reports:
        for one in report.content["providers"]:
            if not one["levels"] or not one["source_hash"]:
                continue
            current = now.get((one["op"], one["provider"]))
            if current != one["source_hash"]:
                what = "is not there any more" if current is None else "has changed since"
                lines.append(
                    f"{report.place}: {one['provider']} of {one['op']} {what}; its level {one['level']} is old"
                )
    return lines


def with_table(readme: str, text: str) -> str:
    """The page with the table between its markers. Raises `InputError` without them."""
    if readme.count(BEGIN) != 1 or readme.count(END) != 1 or readme.index(BEGIN) > readme.index(END):
        raise InputError("README.md: the support table's markers are missing", hint=f"{BEGIN} and {END}")
    head, _, rest = readme.partition(BEGIN)
    return f"{head}{BEGIN}\n\n{text}\n{END}{rest.partition(END)[2]}"


def main(words: Sequence[str], root: Path = ROOT) -> int:
    if list(words) not in (["--write"], ["--check"]):
        print(__doc__, file=sys.stderr)
        return 4
    reports = read_reports(root / "ci" / "reports")
    readme = root / "README.md"
    wanted = {
        readme: with_table(readme.read_text("utf-8"), table(reports, operator_names())),
        root / "dispatch" / "evidence.json": json.dumps({"schema": SCHEMA, "levels": levels_of(reports)}, indent=1)
        + "\n",
    }
    old = [path for path, text in wanted.items() if not path.exists() or path.read_text("utf-8") != text]
    for path in old:
        if words[0] == "--write":
            path.write_text(wanted[path], "utf-8")
        else:
            print(f"{path.name} is not what the reports say; run {COMMAND}", file=sys.stderr)
    for line in changed_since(reports, default_registry()):
        print(f"note: {line}")
    return int(bool(old) and words[0] == "--check")


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except InputError as problem:
        print(f"support_table: {problem}", file=sys.stderr)
        sys.exit(4)
