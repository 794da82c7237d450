"""The conformance page as a file: complete, escaped, self-contained, and never made from a malformed report."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import shlex
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from k3hal.conform import page
from k3hal.conform.page import write_page
from k3hal.conform.page.compact import TEXTS, commands_of
from k3hal.conform.page.load import load_report
from k3hal.conform.page.write import SCRIPTS
from k3hal.conform.result import CheckResult
from k3hal.debug.case import sample_case
from k3hal.dispatch.registry import get_operator
from k3hal.errors import InputError, K3HALError, UsageError

from .synthetic_report import HOSTILE, hostile_report, synthetic_report, write_package


class Page(HTMLParser):
    """The tags, attributes and raw texts of a page, as a browser would find them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.raw: dict[str, list[str]] = {}
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        self._inside = tag
        if tag in ("script", "style", "title"):
            self.raw.setdefault(tag, []).append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside in self.raw:
            self.raw[self._inside][-1] += data

    @property
    def data(self) -> dict[str, Any]:
        return json.loads(self.raw["script"][0])


def _page(folder: Path, report: Any) -> Page:
    write_page(write_package(folder / "package", report), folder / "page.html")
    return Page((folder / "page.html").read_text(encoding="utf-8"))


def test_nothing_is_loaded_from_elsewhere(tmp_path: Path) -> None:
    made = _page(tmp_path, synthetic_report(40))
    assert [(tag, value) for tag, name, value in made.attributes if name in ("src", "href")] == [("a", "#matrix")]
    assert not {"link", "img", "iframe", "object", "embed", "base"} & set(made.tags)
    (style,), script = made.raw["style"], made.raw["script"][1]
    assert not re.search(r"url\(|@import|@font-face", style)
    assert not re.search(r"\bfetch\(|XMLHttpRequest|WebSocket|\bimport\b|https?://|innerHTML|\beval\b", script)


def test_the_browser_is_told_to_run_this_script_alone(tmp_path: Path) -> None:
    made = _page(tmp_path, synthetic_report(4))
    (policy,) = (v for tag, name, v in made.attributes if (tag, name) == ("meta", "content") and "default-src" in v)
    for kind, text in (("style-src", made.raw["style"][0]), ("script-src", made.raw["script"][1])):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind} 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none';")


def test_no_text_of_a_report_becomes_markup(tmp_path: Path) -> None:
    plain, hostile = _page(tmp_path, synthetic_report(3)), _page(tmp_path, hostile_report())
    assert hostile.tags == plain.tags
    assert [a for a in hostile.attributes if a[1] != "content"] == [a for a in plain.attributes if a[1] != "content"]
    assert hostile.raw["script"][1] == plain.raw["script"][1]
    assert hostile.data["statement"]["product"] == HOSTILE
    assert HOSTILE in hostile.raw["title"][0]


def test_every_check_and_number_is_in_the_page(tmp_path: Path) -> None:
    report = synthetic_report(300)
    data = _page(tmp_path, report).data
    strings = data["strings"]
    assert len(data["rows"]) == 300
    for row, check in zip(data["rows"], report["checks"], strict=True):
        assert {name: strings[i] for name, i in zip(TEXTS, row, strict=False)} == {name: check[name] for name in TEXTS}
        seconds, problems, tensors, _ = row[len(TEXTS) :]
        assert math.isclose(seconds, check["seconds"], rel_tol=1e-5)
        assert [strings[i] for i in problems] == check["problems"]
        for values, tensor in zip(tensors, check["tensors"], strict=True):
            assert [strings[values[i]] for i in (0, 1, 2, 7)] == [
                tensor[key] for key in ("name", "tolerance", "status", "problem")
            ]
            for shown, key in zip(values[3:7], ("tensor", "slice", "peak", "peer"), strict=True):
                assert shown == (None if tensor[key] is None else pytest.approx(tensor[key], rel=1e-5))
    for part in ("statement", "device", "versions", "env", "policy", "providers", "end_to_end", "waivers", "counts"):
        assert data[part] == report[part]
    assert sorted(op for ops in data["families"].values() for op in ops) == sorted(
        {p["op"] for p in report["providers"]}
    )


def test_an_operator_of_another_version_is_shown_last(tmp_path: Path) -> None:
    report = synthetic_report(20)
    report["checks"][0] |= {"op": "aaa_unknown"}
    assert list(_page(tmp_path, report).data["families"].items())[-1] == ("other", ["aaa_unknown"])


def test_commands_are_quoted_for_a_shell() -> None:
    case = "cases/a b$(x).k3case"
    plain = CheckResult("linear", "v.p;q", "float32", "tiny", "any", "c", "sample", "Fail", case_file=case)
    check = replace(plain, kind="invariant:split")
    replay, compare = commands_of(check, "cuda:1")
    where = ["--provider", "v.p;q", "--device", "cuda:1"]
    assert shlex.split(replay) == ["k3hal", "op", "replay", case, *where]
    assert shlex.split(compare)[:4] == ["k3hal", "op", "compare", "linear"]
    assert shlex.split(compare)[-4:-2] == ["--invariant", "split"]
    assert len(commands_of(plain, "auto")) == 1
    assert commands_of(replace(plain, status="Pass", case_file=""), "cpu") == []


def test_a_failure_without_a_case_is_reproduced_from_its_sample() -> None:
    operator = get_operator("silu_and_mul")
    sample = next(s for s in operator.samples() if s.dtype == "bfloat16")
    case = sample_case(operator, sample).id
    crash = CheckResult("silu_and_mul", "v.p", "bfloat16", "tiny", "any", case, "sample", "Crash")
    (command,) = commands_of(crash, "cpu")
    assert shlex.split(command)[6:] == ["--sample", sample.name, "--dtype", "bfloat16", "--isolate", "--device", "cpu"]


def test_six_thousand_checks_make_a_small_page(tmp_path: Path) -> None:
    package = write_package(tmp_path, synthetic_report(6000))
    write_page(package, tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size < 2_000_000
    assert (tmp_path / "page.html").stat().st_size < (package / "report.json").stat().st_size / 2


def test_the_same_report_makes_the_same_page(tmp_path: Path) -> None:
    package = write_package(tmp_path, synthetic_report(50))
    write_page(package, tmp_path / "a.html")
    write_page(package, tmp_path / "b.html")
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


def test_every_script_of_the_folder_is_in_the_page() -> None:
    assert sorted(SCRIPTS) == sorted(path.name for path in Path(page.__path__[0]).glob("*.js"))


MALFORMED = {
    "no-json": ("{", "not JSON"),
    "an-array": ("[]", "no report"),
    "nan": ('{"seconds": NaN}', "NaN is no JSON number"),
    "deep": ("[" * 100_000, "not JSON"),
    "schema": ('{"schema": "k3hal.conform/2"}', "schema is 'k3hal.conform/2'"),
    "no-parts": ('{"schema": "k3hal.conform/1"}', "'statement' is missing"),
}


@pytest.mark.parametrize(("text", "says"), MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_report_is_one_line(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "report.json").write_text(text, encoding="utf-8")
    with pytest.raises(InputError) as caught:
        write_page(tmp_path, tmp_path / "page.html")
    message = str(caught.value)
    assert says in message and message.startswith(str(tmp_path)) and "\n" not in message
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (("checks", 1, "status"), "Passed", "checks 1: status is 'Passed'"),
        (("checks", 1, "problems"), [1], "checks 1: problems: 1 is not a string"),
        (("checks", 1, "problems"), [[]], "checks 1: problems: [] is not a string"),
        (("checks", 0, "tensors", 0, "slice"), "0.1", "checks 0: slice is '0.1', not a number from 0 on"),
        (("checks", 0, "tensors", 0, "peer"), True, "checks 0: peer is True, not a number from 0 on"),
        (("providers", 0, "levels"), {}, "providers 0: 'levels' is dict"),
        (("providers", 0, "levels"), [{}], "providers 0: levels: 'dtype' is missing"),
        (("providers", 0, "refusals"), ["no"], "providers 0: refusals: str where an object belongs"),
        (("policy", "classes", "norm"), 3, "policy.classes 'norm': int where an object belongs"),
        (("end_to_end",), None, "'end_to_end' is NoneType"),
    ],
)
def test_a_wrong_value_is_named(tmp_path: Path, path: tuple[Any, ...], value: Any, says: str) -> None:
    report = synthetic_report(20, failing=False)
    report["checks"].sort(key=lambda check: not check["tensors"])
    _put(report, path, value)
    with pytest.raises(InputError, match=re.escape(says)):
        load_report(write_package(tmp_path, report))


def test_a_number_beyond_all_numbers_is_one_line(tmp_path: Path) -> None:
    text = json.dumps(synthetic_report(2) | {"seconds": 12345.5})
    (tmp_path / "report.json").write_text(text.replace("12345.5", "1e999"), encoding="utf-8")
    with pytest.raises(InputError, match=r"report\.json: .*not JSON compliant"):
        write_page(tmp_path, tmp_path / "page.html")


def _put(document: Any, path: tuple[Any, ...], value: Any) -> None:
    for key in path[:-1]:
        document = document[key]
    document[path[-1]] = value


def test_no_package_and_no_place_to_write_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"report\.json: No such file"):
        write_page(tmp_path / "absent", tmp_path / "page.html")
    (tmp_path / "report.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(InputError, match=r"report\.json: not JSON: 'utf-8'"):
        write_page(tmp_path, tmp_path / "page.html")
    package = write_package(tmp_path / "package", synthetic_report(2))
    with pytest.raises(UsageError, match="cannot write"):
        write_page(package, tmp_path / "absent" / "page.html")


_TEXT = st.text(st.characters(exclude_categories=()))  # half surrogate pairs too
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | _TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), value=_JSON)
def test_any_value_anywhere_makes_a_page_or_one_line(tmp_path: Path, data: st.DataObject, value: Any) -> None:
    report = synthetic_report(6)
    at: Any = report
    while True:
        key = data.draw(st.sampled_from(list(at) if isinstance(at, dict) else range(len(at))))
        if not isinstance(at[key], dict | list) or not at[key] or data.draw(st.booleans()):
            break
        at = at[key]
    at[key] = value
    made, refused = _made_or_refused(tmp_path, report)
    assert len(refused.splitlines()) == (0 if made else 1)
    if made:
        assert len(made.data["rows"]) == len(report["checks"])
        assert made.raw["script"][1].endswith("})();\n")


def _made_or_refused(folder: Path, report: Any) -> tuple[Page | None, str]:
    try:
        return _page(folder, report), ""
    except K3HALError as error:
        return None, str(error)
