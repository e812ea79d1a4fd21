"""The report in a browser: it fits a phone, its plots are drawn and can be walked over by pointer and by keyboard."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import foretell
from foretell.cost import estimate, lower
from foretell.hardware import device
from foretell.report.html import Page, html_page, variations

HOSTILE = '<img src=x onerror=alert(1)><script>alert(1)</script>'


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A training step on one device; the same, hostile names in it, on three."""
    graph = foretell.capture("llm:gpt2", seq_len=256, batch=4, train=True, precision="amp")
    on = [device(name) for name in ("a100-sxm4-80gb", "t4", "epyc-7742")]
    folder = tmp_path_factory.mktemp("pages")
    written = {}
    hostile = replace(
        graph, name=HOSTILE, ops=tuple(replace(op, module=f"{HOSTILE}.{op.module}") for op in graph.ops)
    )
    for name, workload, devices in (("one", graph, on[:1]), ("three", hostile, on)):
        program = lower(workload)
        estimates = [estimate(workload, d, program=program) for d in devices]
        found = {d.name: variations(workload, d, e, program=program) for d, e in zip(devices, estimates, strict=True)}
        path = folder / f"{name}.html"
        command = f"foretell predict {'x' * 300}"
        path.write_text(
            html_page(Page(workload, estimates, devices, command=command, program=program, variations=found)),
            encoding="utf-8",
        )
        written[name] = path
    return written


Open = Callable[..., Any]


@pytest.fixture
def show(chromium: Any, files: dict[str, Path]) -> Iterator[Open]:
    """`show("one", width=390)` opens a page; whatever it asks for, or raises, fails the test."""
    contexts, asked, raised = [], [], []

    def open_page(name: str, width: int = 1280, scheme: str = "light", **more: Any) -> Any:
        context = chromium.new_context(viewport={"width": width, "height": 844}, color_scheme=scheme, **more)
        contexts.append(context)
        page = context.new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: raised.append(str(error)))
        page.on("dialog", lambda dialog: raised.append(dialog.message))
        page.on("console", lambda message: raised.append(message.text))
        page.goto(files[name].as_uri())
        page.wait_for_selector("article:not([hidden]) [data-plot=icicle] svg")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert set(asked) <= {path.as_uri() for path in files.values()}
    assert raised == []


@pytest.mark.parametrize("width", [320, 390, 768, 1280])
@pytest.mark.parametrize("name", ["one", "three"])
def test_no_page_is_wider_than_the_screen(show: Open, name: str, width: int) -> None:
    page = show(name, width)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    wide = page.evaluate(
        """() => [...document.querySelectorAll("body *")].filter((e) => e.getClientRects().length
        && !e.closest(".hidden, thead, #tip") && e.getBoundingClientRect().right > innerWidth + 1)
        .map((e) => e.outerHTML.slice(0, 120))"""
    )
    assert wide == []


def test_every_plot_is_drawn(show: Open) -> None:
    page = show("one")
    assert page.locator("[data-plot=roofline] circle.mark").count() > 5
    assert page.locator("[data-plot=traffic] circle.mark").count() > 5
    assert page.locator("[data-plot=memory] path.area").count() == 1
    assert page.locator("[data-plot=icicle] g.cell").count() > 10
    assert "ridge" in page.locator("[data-plot=roofline]").inner_text()
    assert "peak" in page.locator("[data-plot=memory]").inner_text()
    for words in ("forward", "backward", "optimizer"):
        assert words in page.locator("[data-plot=icicle]").inner_text()


def boxes(page: Any, selector: str) -> list[dict[str, float]]:
    found: list[dict[str, float]] = page.eval_on_selector_all(
        selector,
        """all => all.map((e) => { const b = e.getBoundingClientRect();
        return {l: b.left, r: b.right, t: b.top, b: b.bottom}; })""",
    )
    return found


@pytest.mark.parametrize("width", [320, 390, 1280])
@pytest.mark.parametrize("plot", ["roofline", "traffic", "memory"])
def test_texts_of_a_plot_neither_overlap_nor_leave_it(show: Open, plot: str, width: int) -> None:
    page = show("one", width)
    (frame,) = boxes(page, f"[data-plot={plot}] > svg")
    texts = boxes(page, f"[data-plot={plot}] text:not([transform])")
    assert len(texts) > 4
    for i, one in enumerate(texts):
        assert one["l"] >= frame["l"] - 1
        assert one["r"] <= frame["r"] + 1
        for other in texts[i + 1 :]:
            apart = one["r"] <= other["l"] or other["r"] <= one["l"] or one["b"] <= other["t"] + 2
            assert apart or other["b"] <= one["t"] + 2, (one, other)


def test_the_pointer_is_told_what_is_under_it(show: Open) -> None:
    page = show("one")
    page.locator("[data-plot=roofline] circle.mark").first.hover()
    said = page.locator("#tip").inner_text()
    assert "FLOP/s at" in said
    assert "of the step" in said
    assert "writes" in said
    page.mouse.move(5, 5)
    assert page.locator("#tip").is_hidden()


def test_a_tap_is_told_as_well(show: Open) -> None:
    page = show("one", 390, has_touch=True, is_mobile=True)
    page.locator("[data-plot=traffic] circle.mark").first.tap()
    assert "B/s" in page.locator("#tip").inner_text()


def test_the_keyboard_walks_over_a_plot(show: Open) -> None:
    page = show("one")
    page.locator("[data-plot=roofline] svg").focus()
    page.keyboard.press("Home")
    first = page.locator("#tip").inner_text()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    second = page.locator("#tip").inner_text()
    assert first != second
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    assert page.locator("#tip").inner_text() == first
    assert page.locator("circle.mark.on").count() == 1
    page.evaluate("scrollBy(0, 40)")
    page.wait_for_timeout(100)
    assert page.locator("#tip").is_visible()  # it goes along
    page.keyboard.press("Escape")
    assert page.locator("#tip").is_hidden()
    page.locator("[data-plot=memory] svg").focus()
    page.keyboard.press("ArrowRight")
    peak = page.locator("[data-plot=memory] text", has_text="peak").text_content()
    assert page.locator("#tip b").inner_text() in peak  # the walk begins at the peak


def test_zooming_into_a_module_and_out(show: Open) -> None:
    page = show("one")
    plot = page.locator("[data-plot=icicle]")
    plot.locator("svg").focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowRight", "Enter"):
        page.keyboard.press(key)
    assert plot.locator(".crumbs [aria-current]").inner_text() == "backward"
    assert page.evaluate("document.activeElement.closest('[data-plot]').dataset.plot") == "icicle"
    assert "forward" not in plot.locator("svg").text_content()
    page.keyboard.press("Backspace")
    assert plot.locator(".crumbs [aria-current]").inner_text() == "whole step"
    plot.locator("g.cell", has_text="forward").first.click()
    assert plot.locator(".crumbs [aria-current]").inner_text() == "forward"
    plot.get_by_role("button", name="whole step").click()
    assert plot.locator(".crumbs [aria-current]").inner_text() == "whole step"


def test_kinds_of_op_can_be_switched_off(show: Open) -> None:
    page = show("one")
    before = page.locator("[data-plot=roofline] circle.mark").count()
    switch = page.get_by_role("button", name="matrix products")
    switch.press("Enter")
    assert switch.get_attribute("aria-pressed") == "false"
    assert page.locator("[data-plot=roofline] circle.mark").count() < before
    switch.click()
    assert page.locator("[data-plot=roofline] circle.mark").count() == before


def test_tabs_by_keyboard_and_names_that_are_markup(show: Open) -> None:
    page = show("three")
    assert page.locator("article:not([hidden])").count() == 1
    tab = page.get_by_role("tab", name="a100-sxm4-80gb")
    tab.focus()
    page.keyboard.press("ArrowRight")
    assert page.get_by_role("tab", name="t4").get_attribute("aria-selected") == "true"
    assert "T4" in page.locator("article:not([hidden]) h2.device").inner_text()
    page.wait_for_selector("article:not([hidden]) [data-plot=icicle] svg")
    assert page.locator("h1").inner_text().startswith(HOSTILE)
    page.locator("article:not([hidden]) [data-plot=roofline] circle.mark").first.hover()
    assert HOSTILE in page.locator("#tip").inner_text()
    assert page.locator("img").count() == 0
    page.get_by_role("link", name="epyc-7742").click()
    assert "EPYC" in page.locator("article:not([hidden]) h2.device").inner_text()


def test_the_order_of_tab_stops_is_that_of_the_page(show: Open) -> None:
    page = show("one")
    stops = []
    for _ in range(40):
        page.keyboard.press("Tab")
        found = page.evaluate(
            """() => { const e = document.activeElement; if (e === document.body) return null;
            const outline = getComputedStyle(e).outlineWidth;
            const name = e.getAttribute("aria-label") || e.textContent;
            return [e.getBoundingClientRect().top + scrollY, outline, name]; }"""
        )
        if found is None:
            break
        stops.append(found)
    tops = [top for top, _, _ in stops]
    assert tops == sorted(tops)
    assert all(outline == "3px" for _, outline, _ in stops)  # one sees where one is
    names = " ".join(name for _, _, name in stops)
    assert tops  # there are some
    for plot in ("Roofline", "Ops without counted", "Allocated memory", "Time by module", "command"):
        assert plot in names


def test_dark_is_dark(show: Open) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    assert show("one").evaluate(ground) == "rgb(255, 255, 255)"
    assert show("one", scheme="dark").evaluate(ground) == "rgb(20, 24, 29)"


def test_without_its_script_the_tables_are_there(show: Open, chromium: Any, files: dict[str, Path]) -> None:
    context = chromium.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(files["three"].as_uri())
    assert page.locator("article").count() == 3
    assert "switched off here" in page.inner_text("main")
    assert "Time per step" in page.inner_text("main")
    context.close()
