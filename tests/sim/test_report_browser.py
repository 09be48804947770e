"""The reports in a real browser: one run's and the comparison's, on a desk and on a phone, in light and dark.

`pytest tests/sim/test_report_browser.py --screenshots DIR` keeps the pictures, to be looked at.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autoscaler.core.policy import Policy, ReplicaBounds, TargetRef
from autoscaler.sim.comparison import Heading, detail, write_comparison
from autoscaler.sim.profiles import profile
from autoscaler.sim.report import write_report
from autoscaler.sim.run import Run, Setting, run
from autoscaler.sim.scenario import Event
from autoscaler.sim.scored import Scored
from autoscaler.sim.traffic import load_workload
from tests.browser import Screen, Tab, open_tab, running_browser, skip_without_browser

skip_without_browser()

POLICY = Policy(
    name="chat", target=TargetRef(deployment="chat", namespace="serving"), replicas=ReplicaBounds(min=1, max=8)
)
STATIC = replace(POLICY, name="<b>static</b>", replicas=ReplicaBounds(min=3, max=3))
DESK, PHONE = Screen(width=1400, height=900), Screen(width=390, height=844, touch=True)
SCREENS = [
    pytest.param(replace(screen, dark=dark), id=replace(screen, dark=dark).name)
    for screen in (DESK, PHONE)
    for dark in (False, True)
]
PAGES = {"single": {"charts": 14}, "comparison": {"pareto": 4, "latency": 4, "side": 6, "charts": 14}}
"""The charts of each page, and how many lines or rows of bars each has."""


@pytest.fixture(scope="module")
def ran() -> dict[str, Run]:
    """Two policies on twenty minutes."""
    model = replace(profile("llama-3.1-8b-l40sx1"), cold_start_s=40.0)
    workload = load_workload("step:rps=2,to=9,hours=0.34,at=0.3,output=150")
    return {
        policy.name: run(
            policy,
            workload.draw(1).requests(),
            Setting(profile=model, replicas=1, duration_s=workload.duration_s, seed=1),
        )
        for policy in (POLICY, STATIC)
    }


@pytest.fixture(scope="module")
def pages(ran: dict[str, Run], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The pages' addresses."""
    folder = tmp_path_factory.mktemp("pages")
    single, comparison = folder / "single.html", folder / "comparison.html"
    one = ran["chat"]
    rush = Event(at=one.summary.started_at + 400.0, text="a rush: 4.5 x the traffic within one minute")
    write_report(single, one.rows, title="A rush", policy=POLICY, summary=one.summary, events=[rush], note="a test's")
    hours = one.summary.duration_s / 3600.0
    write_comparison(
        comparison,
        [Scored(policy=name, seed=1, hours=hours, figures=each.figures) for name, each in ran.items()],
        [detail(name, 1, each.rows, POLICY, each.summary) for name, each in ran.items()],
        Heading(title="chat & static", facts=[("seeds", "1")], note="a test's", ttft_s=2.0, tpot_s=0.1, price=2.0),
    )
    return {"single": single.as_uri(), "comparison": comparison.as_uri()}


@pytest.fixture(scope="module")
def browser() -> Iterator[str]:
    with running_browser() as address:
        yield address


def keep(path: Path, content: bytes) -> None:
    path.write_bytes(content)


@pytest.mark.parametrize("screen", SCREENS)
@pytest.mark.parametrize("page", PAGES)
async def test_a_page_is_drawn_whole(
    page: str, screen: Screen, pages: dict[str, str], browser: str, screenshots: Path
) -> None:
    async with open_tab(browser) as tab:
        await tab.show(pages[page], screen)
        for chart, lines in PAGES[page].items():
            drawn = await tab.value(LINES % chart)
            assert len(drawn) == lines, f"{chart}: {drawn}"
            assert all(drawn), f"{chart} has a line without a shape: {drawn}"
        picture = await tab.picture()
        keep(screenshots / f"{page}-{screen.name}.png", picture)
        assert len(picture) > 50_000, "an empty page is a small file"
        assert await tab.value("document.documentElement.scrollWidth") == screen.width, "nothing juts out of the page"
        assert await tab.value(OUTSIDE) == []
        assert await tab.value(OVERLAPS) == []
        shades = await tab.value(SHADES)
        assert (shades["page"] < 60, shades["ink"] > 180) == (screen.dark, screen.dark), shades
        assert tab.complaints == []


LINES = """
[...document.querySelectorAll("#%s g.trace:is(.scatter, .bars)")].map(trace =>
  [...trace.querySelectorAll("path")].some(path => path.getAttribute("d")?.length > 8))
"""
"""Each line or row of bars of a chart: whether anything is drawn of it."""

OUTSIDE = """
[...document.querySelectorAll(".main-svg text")].filter(text => text.textContent.trim()).filter(text => {
  const card = text.closest(".card").getBoundingClientRect(), box = text.getBoundingClientRect();
  return box.left < card.left || box.right > card.right || box.top < card.top || box.bottom > card.bottom;
}).map(text => text.textContent)
"""
"""Words of a chart that reach beyond its card."""

OVERLAPS = """
[...document.querySelectorAll(".js-plotly-plot")].flatMap(chart => {
  const words = [...chart.querySelectorAll(".annotation-text, .legendtext")];
  const boxes = words.map(word => word.getBoundingClientRect());
  return words.flatMap((word, i) => words.slice(i + 1).filter((_, j) => {
    const one = boxes[i], other = boxes[i + 1 + j];
    return one.left < other.right && other.left < one.right && one.top + 2 < other.bottom && other.top + 2 < one.bottom;
  }).map(other => `${word.textContent} | ${other.textContent}`));
})
"""
"""Headings, labels and legends that lie on each other."""

SHADES = """
(() => {
  const light = color => Math.max(...color.match(/[0-9]+/g).slice(0, 3).map(Number));
  return { page: light(getComputedStyle(document.body).backgroundColor),
           ink: light(getComputedStyle(document.querySelector("#charts .legendtext")).fill) };
})()
"""
"""How light the page is, and the words of its charts, from 0 to 255."""

RANGE = """
document.getElementById("charts").layout.xaxis.range.map(
  at => typeof at === "number" ? at : Date.parse(at.replace(" ", "T") + "Z"))
"""


TALLEST = """
[...document.querySelectorAll("#charts .nsewdrag")].reduce(
  (one, other) => one.getBoundingClientRect().height > other.getBoundingClientRect().height ? one : other)
"""
"""The chart of the replicas."""


async def _span(tab: Tab) -> Any:
    return await tab.value(RANGE)


@pytest.mark.parametrize("page", PAGES)
async def test_a_pointer_is_told_what_it_points_at(page: str, pages: dict[str, str], browser: str) -> None:
    async with open_tab(browser) as tab:
        await tab.show(pages[page], DESK)
        await tab.point(f"({TALLEST})")
        told = await tab.until("document.querySelector('#charts .hoverlayer')?.textContent")
        for name in ("ready", "ordered", "demand"):
            assert name in told
        assert tab.complaints == []


@pytest.mark.parametrize("screen", [pytest.param(DESK, id="desk"), pytest.param(PHONE, id="phone")])
async def test_a_row_shows_what_was_around_it_and_there_is_a_way_back(
    screen: Screen, pages: dict[str, str], browser: str, screenshots: Path
) -> None:
    async with open_tab(browser) as tab:
        await tab.show(pages["single"], screen)
        whole = await _span(tab)
        assert await tab.value("everything.offsetHeight") == 0, "all is shown: there is nothing to go back to"
        at = await tab.value("Number(document.querySelector('tr[data-at]').dataset.at)")
        await tab.click("document.querySelector('tr[data-at] td')")
        await tab.until("everything.offsetHeight > 0")
        part = await _span(tab)
        assert part[0] <= at <= part[1]
        assert part[1] - part[0] < 0.5 * (whole[1] - whole[0])
        await tab.until("Math.abs(document.getElementById('charts').getBoundingClientRect().top) < 2")
        keep(screenshots / f"row-{screen.name}.png", await tab.picture())
        await tab.click("everything")
        await tab.until("everything.hidden")
        assert await _span(tab) == whole
        assert tab.complaints == []


async def test_a_legend_hides_and_shows_its_line(pages: dict[str, str], browser: str) -> None:
    async with open_tab(browser) as tab:
        await tab.show(pages["single"], DESK)
        lines = await tab.value("document.querySelectorAll('#charts g.trace.scatter').length")
        for left in (lines - 1, lines):
            await tab.click("document.querySelector('#charts .legendtoggle')")
            await tab.until(f"document.querySelectorAll('#charts g.trace.scatter').length === {left}")
        assert tab.complaints == []


async def test_the_comparison_shows_the_run_that_is_chosen(
    ran: dict[str, Run], pages: dict[str, str], browser: str
) -> None:
    async with open_tab(browser) as tab:
        await tab.show(pages["comparison"], DESK)
        for index, name in enumerate(ran):
            await tab.click(f"document.querySelectorAll('#chooser button')[{index}]")
            pressed = "[...document.querySelectorAll('#chooser button[aria-pressed=true]')].map(one => one.textContent)"
            assert await tab.value(pressed) == [name], "and a name is no markup"
            rows = sum(row.acted_to is not None for row in ran[name].rows)
            assert await tab.value("document.querySelectorAll('#actions tr[data-at]').length") == rows
            assert await tab.value("document.getElementById('action-count').textContent") == str(rows)
            assert "within the objectives" in await tab.value("document.getElementById('facts').textContent")
        await tab.click("document.querySelector('summary')")
        assert await tab.value("document.querySelector('details table').offsetHeight") > 0
        assert tab.complaints == []


async def test_colours_and_width_may_change_while_a_page_is_open(pages: dict[str, str], browser: str) -> None:
    async with open_tab(browser) as tab:
        await tab.show(pages["comparison"], DESK)
        await tab.prefer(dark=True)
        await tab.until(f"({SHADES.strip()}).ink > 180")
        await tab.resize(PHONE)
        await tab.until("document.querySelector('#charts .main-svg').getBoundingClientRect().width < 390")
        assert await tab.value(OUTSIDE) == []
        assert await tab.value("document.documentElement.scrollWidth") == PHONE.width
        assert tab.complaints == []


async def test_a_finger_scrolls_the_page_over_a_chart(pages: dict[str, str], browser: str) -> None:
    """On a phone the charts fill the screen: were they to take each drag for a zoom, nobody got past them."""
    async with open_tab(browser) as tab:
        await tab.show(pages["single"], PHONE)
        await tab.value("document.getElementById('charts').scrollIntoView({behavior: 'instant'})")
        before, whole = await tab.value("scrollY"), await _span(tab)
        assert await tab.value("document.elementFromPoint(200, 600).classList.contains('nsewdrag')")
        await tab.swipe(200.0, 600.0, 300.0)
        await tab.until(f"scrollY > {before} + 200")
        assert await _span(tab) == whole
        assert tab.complaints == []


async def test_what_a_page_complains_of_is_heard(tmp_path: Path, browser: str) -> None:
    page = tmp_path / "broken.html"
    scripts = ("console.error('one')", "console.warn('two')", "nothing.there")
    keep(page, "".join(f"<script>{script}</script>" for script in scripts).encode())
    async with open_tab(browser) as tab:
        await tab.show(page.as_uri(), DESK)
        await tab.until("true")
        assert [any(word in each for each in tab.complaints) for word in ("one", "two", "nothing")] == [True] * 3
