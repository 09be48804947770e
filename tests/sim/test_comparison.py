"""The comparison's table and page; `test_report_browser.py` looks at the page."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from autoscaler.core.policy import Policy, ReplicaBounds, TargetRef
from autoscaler.sim.comparison import MAX_ACTIONS, Detail, Heading, detail, table, write_comparison
from autoscaler.sim.profiles import profile
from autoscaler.sim.run import Run, Setting, run
from autoscaler.sim.scored import Scored
from autoscaler.sim.traffic import load_workload

POLICY = Policy(
    name="chat", target=TargetRef(deployment="chat", namespace="serving"), replicas=ReplicaBounds(min=1, max=8)
)
STATIC = replace(POLICY, name="<b>static</b>", replicas=ReplicaBounds(min=3, max=3))
HEADING = Heading(
    title="chat & static on a step",
    facts=[("workload", "a step"), ("seeds", "1 to 2")],
    note="made by a test",
    ttft_s=2.0,
    tpot_s=0.1,
    price=2.0,
)


@pytest.fixture(scope="module")
def ran() -> dict[tuple[str, int], Run]:
    """Two policies on two seeds of twenty minutes."""
    model = replace(profile("llama-3.1-8b-l40sx1"), cold_start_s=40.0)
    workload = load_workload("step:rps=2,to=9,hours=0.34,at=0.3,output=150")
    return {
        (policy.name, seed): run(
            policy,
            workload.draw(seed).requests(),
            Setting(profile=model, replicas=1, duration_s=workload.duration_s, seed=seed),
        )
        for policy in (POLICY, STATIC)
        for seed in (1, 2)
    }


@pytest.fixture(scope="module")
def scores(ran: dict[tuple[str, int], Run]) -> list[Scored]:
    return [
        Scored(policy=policy, seed=seed, hours=one.summary.duration_s / 3600.0, figures=one.figures)
        for (policy, seed), one in ran.items()
    ]


@pytest.fixture(scope="module")
def details(ran: dict[tuple[str, int], Run]) -> list[Detail]:
    return [detail(policy, seed, one.rows, POLICY, one.summary) for (policy, seed), one in ran.items() if seed == 1]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory, scores: list[Scored], details: list[Detail]) -> Path:
    path = tmp_path_factory.mktemp("page") / "simulation.html"
    write_comparison(path, scores, details, HEADING)
    return path


def test_a_row_a_policy(scores: list[Scored]) -> None:
    headings, rows = table(scores)
    assert [row[:2] for row in rows] == [("chat", "2"), ("<b>static</b>", "2")]
    assert all(len(row) == len(headings) for row in rows)
    ratios = [float(row[headings.index("× cheapest")]) for row in rows]
    assert min(ratios) == 1.0
    attainment = rows[0][headings.index("attainment")]
    assert re.fullmatch(r"\d+\.\d\d % \(\d+\.\d\d–\d+\.\d\d\)", attainment), "mean, lowest and highest"


def test_cost_is_gpu_hours_at_the_price(scores: list[Scored]) -> None:
    headings, rows = table(scores, price=2.0)
    assert headings[-1] == "cost"
    mean = sum(one.figures.gpu_hours for one in scores if one.policy == "chat") / 2
    assert rows[0][-1] == f"{2.0 * mean:,.2f}"


def test_a_run_in_a_line_says_what_failed_and_what_it_cost(
    tmp_path: Path, scores: list[Scored], details: list[Detail]
) -> None:
    some = replace(scores[0], figures=replace(scores[0].figures, failed=1003, fates={"timed_out": 1000, "killed": 3}))
    write_comparison(tmp_path / "s.html", [some, *scores[1:]], details, HEADING)
    text = (tmp_path / "s.html").read_text()
    assert "failed: 1,000 timed out, 3 killed; " in text
    assert "failed: none; " in text
    assert f"; cost {2.0 * some.figures.gpu_hours:,.2f}" in text


def test_no_requests_no_latency(scores: list[Scored]) -> None:
    nan = (float("nan"),) * 3
    empty = replace(scores[0], figures=replace(scores[0].figures, attainment=None, ttft_s=nan, tpot_s=nan))
    headings, (row,) = table([empty])
    assert row[headings.index("TTFT p99")] == "–"


def test_the_page_needs_no_network_and_nothing_acts_as_markup(page: Path) -> None:
    text = re.sub(r"<script.*?</script>", "", page.read_text(), flags=re.DOTALL)
    assert "<!--" not in text
    assert not re.findall(r"(?:src|href)=|@import|url\(", text)
    assert "<b>static" not in page.read_text()
    assert "&lt;b&gt;static&lt;/b&gt;" in text
    assert "chat &amp; static on a step" in text


def test_a_restless_run_does_not_fill_the_page(ran: dict[tuple[str, int], Run]) -> None:
    one = ran["chat", 1]
    acted = next(row for row in one.rows if row.acted_to is not None)
    restless = detail("chat", 1, [acted] * (MAX_ACTIONS + 50), POLICY, one.summary)
    assert restless.actions.count("<tr") == MAX_ACTIONS
    assert restless.action_count == MAX_ACTIONS + 50
