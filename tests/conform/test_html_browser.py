"""The conformance page in a real browser: what a reader sees, clicks, types and prints.

Needs playwright (`pip install k3hal[browser]`) and a Chromium: the one `CHROMIUM` names, or one on the path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from k3hal.conform.page import write_page
from k3hal.conform.result import BAD

from .synthetic_report import HOSTILE, hostile_report, synthetic_report, write_package

pytestmark = pytest.mark.tools

Open = Callable[..., Any]


@pytest.fixture
def show(browser: Any, tmp_path: Path) -> Iterator[Open]:
    """`show(report, **context options)`: a page of the report; at the end no script failed and nothing was loaded."""
    troubles: list[str] = []
    contexts = []

    def opened(report: Any, hash: str = "", **options: Any) -> Any:
        write_page(write_package(tmp_path, report), tmp_path / "page.html")
        context = browser.new_context(reduced_motion="reduce", **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(5000)
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("console", lambda message: troubles.append(message.text))
        url = f"file://{tmp_path / 'page.html'}{hash}"
        page.on("request", lambda request: troubles.append(request.url) if request.url != url.split("#")[0] else None)
        page.goto(url)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert troubles == []


def _texts(page: Any, selector: str) -> list[str]:
    return page.locator(selector).all_inner_texts()


def _cell(page: Any, op: str, provider: str) -> Any:
    return page.locator(f'button.cell[aria-label^="{op}, {provider},"]')


def test_matrix_has_every_operator_provider_level_and_count(show: Open) -> None:
    report = synthetic_report(300)
    page = show(report)
    assert page.title() == "k3hal conformance on NVIDIA H200"
    rows = _texts(page, ".matrix tbody tr:not(.family) th")
    assert sorted(rows) == sorted({provider["op"] for provider in report["providers"]})
    assert page.locator("button.cell").count() == len(report["providers"])
    for provider in report["providers"][:12]:
        passed, of = (sum(level[key] for level in provider["levels"]) for key in ("passed", "of"))
        words = _cell(page, provider["op"], provider["provider"]).inner_text()
        assert provider["level"] in words and f"{passed}/{of}" in words


def test_failures_come_first_and_open_to_their_command(show: Open) -> None:
    report = synthetic_report(400)
    bad = [check for check in report["checks"] if check["status"] in BAD]
    page = show(report)
    assert page.locator("main > section:visible").first.get_attribute("id") == "failures"
    assert page.locator("#failures .check").count() == len(bad) > 0
    failed = next(c for c in bad if c["status"] == "Fail" and c["kind"] == "sample")
    page.locator("#failures .check", has_text=failed["case"]).locator("button").click()
    shown = page.locator("#failures .evidence").inner_text()
    assert f"k3hal op replay {failed['case_file']} --provider {failed['provider']} --device cuda" in shown
    assert "cap 0.016" in shown or "bit-exact" in shown or "cap 1.00e-4" in shown
    assert "is above its cap" in shown


def test_no_failures_section_without_failures(show: Open) -> None:
    page = show(synthetic_report(100, failing=False))
    assert page.locator("#failures").is_hidden()
    assert "No check failed" in page.locator(".verdict").inner_text()


def test_drill_down_shows_the_numbers(show: Open) -> None:
    report = synthetic_report(400, failing=False)
    check = next(c for c in report["checks"] if c["op"] == "linear" and c["tensors"] and c["tensors"][0]["peer"])
    page = show(report)
    _cell(page, "linear", check["provider"]).click()
    dialog = page.get_by_role("dialog", name=f"linear {check['provider']}")
    dialog.locator(".check", has_text=check["case"]).locator("button").click()
    shown = dialog.locator(".evidence").inner_text()
    tensor = check["tensors"][0]
    for key in ("tensor", "slice", "peak", "peer"):
        assert _as_shown(tensor[key]) in shown
    assert f"{_as_shown(tensor['tensor'] / max(tensor['peer'], 0.0017))} ×" in shown
    assert check["case"] in shown and "cap 0.005" in shown


def _as_shown(value: float) -> str:
    """Three digits, with an exponent where the number is small."""
    return f"{float(f'{value:.3g}'):g}" if value >= 0.001 else f"{value:.2e}".replace("e-0", "e-")


def test_filters_narrow_the_matrix_the_list_and_the_counts(show: Open) -> None:
    report = synthetic_report(400)
    page = show(report)
    wanted = [c for c in report["checks"] if c["status"] == "QualityWarning" and c["dtype"] == "bfloat16"]
    page.get_by_label("Status").select_option("QualityWarning")
    page.get_by_label("dtype").select_option("bfloat16")
    assert page.get_by_role("status").inner_text() == f"{len(wanted)} of 400 checks match."
    assert page.locator("#checks .check").count() == len(wanted)
    assert set(_texts(page, ".matrix tbody tr:not(.family) th")) == {c["op"] for c in wanted}
    page.get_by_label("Search").fill("KDA_")
    searched = [c for c in wanted if "kda_" in c["op"]]
    page.get_by_text(f"{len(searched)} of 400 checks match.").wait_for()
    assert sorted(_texts(page, "#checks .check .case")) == sorted(c["case"] for c in searched)
    page.get_by_role("button", name="Clear filters").click()
    assert page.get_by_role("status").inner_text() == "400 checks."
    page.get_by_label("Search").fill("no such check")
    page.wait_for_selector("text=No operator matches.")
    assert page.locator("#checks").inner_text().endswith("No check matches.")


def test_a_tile_lists_its_checks(show: Open) -> None:
    report = synthetic_report(400)
    page = show(report)
    page.locator(".tile", has_text="Waived").click()
    waived = [c["case"] for c in report["checks"] if c["status"] == "Waived"]
    assert sorted(_texts(page, "#checks .check .case")) == sorted(waived)
    assert page.evaluate("document.activeElement.id") == "checks"


def test_keys_alone_reach_open_read_and_close_a_cell(show: Open) -> None:
    page = show(synthetic_report(300, failing=False))
    page.locator("button.cell").first.focus()
    before = page.evaluate("document.activeElement.getAttribute('aria-label')")
    page.keyboard.press("ArrowDown")
    label = page.evaluate("document.activeElement.getAttribute('aria-label')")
    assert label != before
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    assert page.locator("dialog").is_visible()
    assert page.evaluate("document.querySelector('dialog').contains(document.activeElement)")
    page.locator("dialog .open").first.focus()
    page.keyboard.press("Enter")
    assert page.locator("dialog .open").first.get_attribute("aria-expanded") == "true"
    page.keyboard.press("Escape")
    assert page.locator("dialog").is_hidden()
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == label


def test_a_link_opens_its_cell(show: Open) -> None:
    page = show(synthetic_report(200, failing=False))
    page.locator("button.cell").nth(3).click()
    link, title = page.evaluate("location.hash"), page.locator("#detail-title").inner_text()
    again = show(synthetic_report(200, failing=False), hash=link)
    assert again.locator("#detail-title").inner_text() == title
    again.get_by_role("button", name="Close").click()
    assert again.evaluate("location.hash") == ""


def test_hostile_text_stays_text(show: Open) -> None:
    page = show(hostile_report())
    page.locator("#failures .open").first.click()
    page.locator("button.cell.bad").first.click()
    assert page.evaluate("window.broken") is None
    assert page.locator("img").count() == 0
    assert page.locator("script").count() == 2
    assert " ".join(HOSTILE.split()) in " ".join(page.locator("#detail-title").inner_text().split())
    assert page.locator("a:not(.skip)").count() == 0  # the waiver's issue is no http address


@pytest.mark.parametrize("width", [360, 768, 1360])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_wider_than_the_screen(show: Open, width: int, scheme: str) -> None:
    page = show(synthetic_report(200), color_scheme=scheme, viewport={"width": width, "height": 800})
    page.locator("#failures .open").first.click()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.locator("button.cell").first.click()
    assert page.evaluate("document.querySelector('dialog').scrollWidth") <= width


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_ground(show: Open, low_contrast: Callable[[Any], list[str]], scheme: str) -> None:
    """Contrast of at least 4.5 : 1 wherever text has a ground of its own colour or its parents'."""
    page = show(synthetic_report(200), color_scheme=scheme)
    page.locator("#failures .open").first.click()
    assert low_contrast(page) == []


def test_prints_in_light_without_controls(show: Open) -> None:
    page = show(synthetic_report(50), color_scheme="dark")
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.locator(".filters").is_hidden() and page.locator(".theme").is_hidden()
    assert page.locator(".matrix").is_visible()
    assert page.evaluate("getComputedStyle(document.body).color") == "rgb(23, 27, 33)"


def test_six_thousand_checks_are_made_as_they_are_asked_for(show: Open) -> None:
    page = show(synthetic_report(6000))
    assert page.locator("#checks .check").count() == 50
    assert page.evaluate("document.querySelectorAll('*').length") < 8000
    page.locator("#checks > div > button").click()
    assert page.locator("#checks .check").count() == 100
