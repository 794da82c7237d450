"""The statement of a package: what was judged, on what, and what came of it, for a person to read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from k3hal.conform.environment import is_emulated
from k3hal.conform.variants import DEFAULT


def statement_text(report: Mapping[str, Any]) -> str:
    """`statement.md` of a report: the same text for the same report, so that `verify` can tell an edited one."""
    return "\n".join([*_head(report), "", *_result(report), "", *_table(report), *_failures(report), ""])


def _head(report: Mapping[str, Any]) -> Iterator[str]:
    said, device, versions = report["statement"], report["device"], report["versions"]
    yield f"# Conformance of {said['product']} {said['version']} on {device['title'] or device['device']}"
    yield ""
    commit = said["commit"] or "none known, an installed package"
    yield f"- commit: {commit}{', with changes that are not committed' if said['dirty'] else ''}"
    for one in report.get("packages", ()):
        at = one["commit"] or ("no commit" if one["dirty"] else "an installed package")
        changed = ", with changes that are not committed" if one["dirty"] and one["commit"] else ""
        yield f"- backend {one['backend']}: {one['name']} {one['version']}, {at}{changed}"
    yield f"- created: {said['created']}"
    yield f"- device: {device['vendor']} {device['arch']}, {device['system']}" + (
        f", driver {device['driver']}" if device["driver"] else ""
    )
    if is_emulated(report):
        yield "- emulated: its libraries are restated in torch, Triton is interpreted, and all of it ran on a CPU"
    yield "- versions: " + ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    if report["env"]:
        yield "- environment: " + ", ".join(f"`{name}={value}`" for name, value in report["env"].items())
    yield f"- selection: {_selection(report['selection'])}"
    yield f"- must-pass list: {report['must_pass']['count']} checks, sha256 {report['must_pass']['hash']}"
    yield f"- tolerance policy: sha256 {report['policy']['hash']}"


def _selection(chosen: Mapping[str, Any]) -> str:
    words = ["quick subset" if chosen["quick"] else "every sample", f"operators {chosen['ops']}"]
    if chosen["backend"]:
        words.append(f"providers of {chosen['backend']} only")
    if chosen["large"]:
        words.append("full-size shapes included")
    if chosen["graphs"]:
        words.append("graph replay included")
    return ", ".join(words)


def _result(report: Mapping[str, Any]) -> Iterator[str]:
    counts = ", ".join(f"{number} {status}" for status, number in report["counts"].items() if number)
    yield f"{sum(report['counts'].values())} checks in {report['seconds']:.0f} s: {counts or 'none'}."
    for one in report["end_to_end"]:
        numbers = ""
        if one["rms"] is not None:
            numbers = f": top-1 agreement {one['top1']:.3g}, KL {one['kl_mean']:.2g} mean and {one['kl_max']:.2g} most"
            numbers += f", rms {one['rms']:.2g}"
        why = f" ({one['problem']})" if one["problem"] else ""
        yield f"End to end, {run_name(one)}: {one['status']}{numbers}{why}."
    if report.get("unmeasured"):
        yield f"Not all was timed: {report['unmeasured']}."
    for waiver in report["waivers"]:
        state = waiver["problem"] or ("in use" if waiver["used"] else "not used in this run")
        yield f"Waiver {waiver['id']} of {waiver['op']}, until {waiver['expires']}, {waiver['issue']}: {state}."


def run_name(one: Mapping[str, Any]) -> str:
    """What ran, of an end-to-end result; packages from before there were variants have only the default one."""
    variant = one.get("variant", DEFAULT)
    return f"{one['preset']} in {one['dtype']}" + ("" if variant == DEFAULT else f" ({variant})")


def _table(report: Mapping[str, Any]) -> Iterator[str]:
    yield "| operator | provider | level | passed | note |"
    yield "|---|---|---|---|---|"
    for one in report["providers"]:
        passed, of = (sum(row[key] for row in one["levels"]) for key in ("passed", "of"))
        yield f"| {one['op']} | {one['provider']} | {one['level']} | {passed}/{of} | {_note(one)} |"


def _note(one: Mapping[str, Any]) -> str:
    if one["reference_only"]:
        return "only the reference"
    reasons = sorted({reason for refusal in one["refusals"] for reason in refusal["reasons"]})
    if not one["levels"]:
        return "says No: " + "; ".join(reasons)
    weaker = [
        f"{row['dtype']} {row['shape_class']} {row['level']}" for row in one["levels"] if row["level"] != one["level"]
    ]
    return ", ".join(weaker)  # fmt: skip


def _failures(report: Mapping[str, Any]) -> Iterator[str]:
    bad = [check for check in report["checks"] if check["status"] in ("Fail", "Crash", "Timeout")]
    if bad:
        yield ""
        yield "## Failures"
        yield ""
    for check in bad:
        kind = "" if check["kind"] == "sample" else f" [{check['kind'].partition(':')[2]}]"
        why = [*check["problems"], *(f"{t['name']}: {t['problem']}" for t in check["tensors"] if t["problem"])]
        where = f" ({check['case_file']})" if check["case_file"] else ""
        yield f"- {check['provider']}, {check['case']}{kind}: {check['status']}: {'; '.join(why)}{where}"
