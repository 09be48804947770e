"""The page's tables and targets, from results by hand."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench.contest.ablations import ablations, joint
from bench.contest.front import duel, duels, everywhere, our_front
from bench.contest.matches import Match, attained_percent, matches
from bench.contest.page import losses, preliminary, write
from bench.contest.picture import Point, pareto
from bench.contest.results import Entry
from bench.contest.searched import read_log, told
from bench.contest.targets import Target, targets
from bench.contest.variants import BATCHING
from bench.oracle import THETAS
from tests.bench.entries import ran

THETA = 0.7
CHEAP, DEAR = "ours margin x0.5", "ours margin x4"


def _match(*entries: Entry) -> Match:
    (match,) = matches(entries)
    return match


def _front(*, seeds: Sequence[int] = (0,)) -> list[Entry]:
    """Return our policy at 99 % for 100 GPU-hours, and at 99.9 % for 200."""
    return [
        run
        for seed in seeds
        for run in (ran("ours", 0.99, 100.0, seed), ran(DEAR, 0.999, 200.0, seed), ran(CHEAP, 0.98, 90.0, seed))
    ]


def _reached(text: str, *entries: Entry) -> Target:
    """Return the one target whose text has these words."""
    (found,) = [one for one in targets(matches(entries)) if text in one.text]
    return found


# -- our front -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attainment", "gpu_hours"),
    [
        pytest.param(0.99, 100.0, id="a-margin"),
        pytest.param(1.0 - 10.0**-2.5, 100.0 * 2.0**0.5, id="halfway-in-logarithms"),
        pytest.param(0.97, 90.0, id="below-the-cheapest"),
        pytest.param(0.9994, 200.0, id="as-good-as-the-dearest"),
        pytest.param(0.9999, None, id="beyond"),
    ],
)
def test_what_an_attainment_takes(attainment: float, gpu_hours: float | None) -> None:
    curve = our_front(_match(*_front()), {0})
    assert curve is not None
    assert curve.gpu_hours(attainment) == (None if gpu_hours is None else pytest.approx(gpu_hours))


def test_margins_that_cost_more_for_less_are_not_of_the_front() -> None:
    curve = our_front(_match(*_front(), ran("ours margin x2.75", 0.985, 150.0)), {0})
    assert curve is not None
    assert [point.gpu_hours for point in curve.points] == [90.0, 100.0, 200.0]


def test_a_rival_meets_our_front_on_the_seeds_that_both_ran_on() -> None:
    match = _match(*_front(seeds=(0, 1)), ran("kpa", 0.99, 80.0, 1), ran("kpa", 0.99, 500.0, 2))
    row = match.row("kpa")
    assert row is not None
    found = duel(match, row)
    assert found is not None
    assert found.gpu_hours == 80.0
    assert found.ratio == pytest.approx(100.0 / 80.0)


def test_a_rival_below_our_cheapest_margin_is_no_duel() -> None:
    match = _match(*_front(), ran("kpa", 0.97, 10.0), ran("oracle", 0.99, 50.0), ran("static-peak", 0.9999, 300.0))
    assert [(one.policy, one.ratio) for one in duels(match)] == [("static-peak", None)]


# -- one configuration -----------------------------------------------------------------------------------------------


def test_policies_that_attain_everywhere_come_first_and_static_fleets_are_left_out() -> None:
    days = [
        [
            ran("ours", 0.991, 11.0, trace=trace),
            ran("kpa", 0.999, 20.0, trace=trace),
            ran("ray-serve", 0.999, 15.0, trace=trace),
            ran("phpa-holt", 0.98 if trace == "code" else 0.999, 9.0, trace=trace),
            ran("phpa-linear", 0.97, 8.0, trace=trace),
            ran("static-peak", 0.999, 30.0, trace=trace),
            ran("oracle", 0.99, 10.0, trace=trace),
        ]
        for trace in ("code", "conv")
    ]
    here_only = [ran("hpa-queue", 0.999, 1.0), ran("kpa", 0.1, 1.0, trace="ramp", day=False)]
    found = everywhere(matches([*days[0], *days[1], *here_only]))
    assert [one.policy for one in found] == ["ours", "ray-serve", "kpa", "phpa-holt", "phpa-linear"]
    assert found[3].lowest == (0.98, "code-x1")
    assert found[3].mean_over == pytest.approx(0.9)


# -- targets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "entries", "met", "says"),
    [
        pytest.param("attainment of", [ran("ours", 0.99, 1.0)], True, "lowest 99.00 % (code-x1, seed 0)", id="attains"),
        pytest.param(
            "attainment of",
            [ran("ours", 0.999, 1.0), ran("ours", 0.98999, 1.0, 3)],
            False,
            "lowest 98.99 % (code-x1, seed 3); 1 of 2 runs",
            id="one-seed-below",
        ),
        pytest.param(
            "attainment of",
            [ran("ours", 0.5, 1.0, day=False), ran("ours", 0.999, 1.0, trace="r1")],
            True,
            "",
            id="of-a-day",
        ),
        pytest.param("on average", [ran("ours", 0.99, 1.08), ran("oracle", 0.99, 1.0)], True, "1.080 x", id="mean"),
        pytest.param("worst trace", [ran("ours", 0.99, 1.2), ran("oracle", 0.99, 1.0)], False, "code-x1", id="worst"),
        pytest.param("1 reversal", [ran("ours", 0.9, 1.0, reversals_per_hour=1.5)], False, "1.50", id="reversals"),
        pytest.param("no flap", [ran("ours", 0.9, 1.0), ran("ours", 0.9, 1.0, 1, flaps=1)], False, "1 in 2", id="flap"),
        pytest.param("no flap", [ran("ours", 0.9, 1.0)], True, "0 in 1 runs", id="no-flap"),
        pytest.param(
            "worst ten minutes",
            [ran("ours", 0.99, 1.0, worst_ten_minutes=0.84), ran("oracle", 0.99, 1.0)],
            False,
            "6.0 points below (code-x1)",
            id="worst-ten-minutes",
        ),
        pytest.param(
            "worst ten minutes",
            [ran("ours", 0.99, 1.0, worst_ten_minutes=0.86), ran("oracle", 0.99, 1.0)],
            True,
            "4.0 points",
            id="worst-ten-minutes-near",
        ),
        pytest.param("fail", [ran("ours", 0.9, 1.0, requests=10_000, failed=2)], True, "0.020 %", id="failed"),
        pytest.param("fail", [ran("ours", 0.9, 1.0, requests=10_000, failed=3)], False, "0.030 %", id="failed-more"),
        pytest.param(
            "5.9 replicas",
            [ran("ours warm", 0.995, 1.0, trace="ramp", day=False, mean_replicas=6.0)],
            False,
            "99.50 % with 6.00 replicas, one seed",
            id="ramp-too-many",
        ),
        pytest.param(
            "without that", [ran("ours", 0.97, 1.0, trace="ramp", day=False)], True, "97.00 %", id="ramp-unlearned"
        ),
        pytest.param(
            "without that",
            [ran("ours", 0.97, 1.0, trace="ramp", scale=4.0, day=False)],
            None,
            "–",
            id="ramp-at-its-own-scale",
        ),
        pytest.param(
            "mooncake",
            [ran("ours", share, 1.0, seed, trace="mooncake", day=False) for seed, share in enumerate((0.98, 1.0))],
            True,
            "99.00 %, 2 seeds, the lowest 98.00 %",
            id="mooncake",
        ),
        pytest.param(
            "mooncake",
            [
                ran("ours", 0.98, 1.0, trace="mooncake", day=False),
                ran("ours with batching", 0.995, 1.0, trace="mooncake", day=False),
            ],
            False,
            "98.00 %, one seed; with the batching limits moved as well 99.50 %, one seed",
            id="mooncake-with-batching",
        ),
    ],
)
def test_targets(text: str, entries: Sequence[Entry], met: bool | None, says: str) -> None:
    found = _reached(text, *entries)
    assert found.met is met
    assert says in found.reached


def test_without_results_nothing_is_met() -> None:
    assert {one.met for one in targets(matches([ran("kpa", 0.99, 1.0)]))} == {None}


@pytest.mark.parametrize(
    ("rival", "met", "says"),
    [
        pytest.param(("kpa", 0.99, 140.0), True, "28.6 % fewer than `kpa`", id="fewer"),
        pytest.param(("kpa", 0.999, 210.0), False, "4.8 % fewer than `kpa`", id="too-little"),
        pytest.param(("kpa", 0.99, 80.0), False, "25.0 % more than `kpa`", id="more"),
        pytest.param(
            ("kpa", 0.985, 300.0), True, "attains 98.50 % on code-x1, and none attains everywhere", id="misses"
        ),
        pytest.param(("kpa", 0.9999, 300.0), False, "more than any of our margins on 1 of 1", id="beyond-our-margins"),
        pytest.param(("kpa", 0.9, 180.0), True, "50.0 % fewer than `kpa`", id="below-our-margins"),
        pytest.param(("static-peak", 0.99, 300.0), None, "–", id="static"),
    ],
)
def test_against_one_configuration(rival: tuple[str, float, float], met: bool | None, says: str) -> None:
    found = _reached("one configuration", *_front(), ran(*rival), ran("oracle", 0.99, 50.0))
    assert found.met is met
    assert says in found.reached


@pytest.mark.parametrize(
    ("rival", "met", "says"),
    [
        pytest.param(("kpa", 0.99, 98.0), True, "at most 1.020 x, `kpa` on code-x1 (99.00 %)", id="within"),
        pytest.param(("static-peak", 0.99, 90.0), False, "1 of 1 are above", id="above"),
        pytest.param(
            ("kpa", 0.9999, 900.0), False, "1 attain more than any of our margins: `kpa` on code-x1", id="not-reached"
        ),
    ],
)
def test_no_rival_is_undercut(rival: tuple[str, float, float], met: bool, says: str) -> None:
    found = _reached("front", *_front(), ran(*rival))
    assert found.met is met
    assert says in found.reached


# -- ablations -------------------------------------------------------------------------------------------------------


def test_an_ablation_is_held_against_the_same_runs() -> None:
    name = "ours without urgency"
    entries = [
        *(ran("ours", 0.99 + 0.001 * seed, 11.0, seed) for seed in range(3)),
        *(ran("oracle", 0.99, 10.0, seed) for seed in range(3)),
        ran(name, 0.95, 12.0, 1, reversals_per_hour=2.0),
        ran("ours", 0.998, 20.0, trace="r1"),
        ran("oracle", 0.99, 10.0, trace="r1"),
        ran(name, 0.99, 18.0, trace="r1"),
        ran("ours", 0.5, 1.0, trace="conv"),
    ]
    (found,) = ablations(matches(entries))
    assert found.policy == name
    assert found.matches == ["code-x1", "r1-x1"]
    assert found.runs == 2
    assert found.variant.attainment == pytest.approx((0.95 + 0.99) / 2)
    assert found.ours.attainment == pytest.approx((0.991 + 0.998) / 2)
    assert found.variant.over == pytest.approx(1.5)
    assert found.ours.over == pytest.approx(1.55)
    assert found.variant.reversals == pytest.approx(1.25)


def test_joint_control_is_held_against_the_same_seeds_and_losses_are_counted() -> None:
    entries = [
        *(ran("ours", 0.99, 10.0, seed) for seed in range(3)),
        *(ran(BATCHING, attained, hours, seed) for seed, (attained, hours) in enumerate([(0.995, 9.0), (0.98, 12.0)])),
        ran("ours", 0.9, 4.0, trace="r1"),
    ]
    (found,) = joint(matches(entries))
    assert (found.match.name, found.higher, found.fewer) == ("code-x1", 1, 1)
    assert found.moved.mean("attainment") == pytest.approx(0.9875)
    assert found.alone.mean("gpu_hours") == pytest.approx(10.0)
    assert found.alone.seeds == {0, 1}


def test_an_ablation_without_an_oracle_has_no_ratio() -> None:
    (found,) = ablations(matches([ran("ours", 0.99, 1.0), ran("ours by score", 0.99, 2.0)]))
    assert (found.variant.over, found.ours.over) == (None, None)


# -- rows ------------------------------------------------------------------------------------------------------------


def test_the_need_is_that_of_the_oracles_theta() -> None:
    under = [0.0] * len(THETAS)
    under[THETAS.index(THETA)] = 0.25
    match = _match(
        ran("ours", 0.99, 1.0, under=under, over=under),
        ran("oracle", 0.99, 1.0, settings={"theta": THETA}, under=under, over=under),
        ran("kpa", 0.99, 1.0),
    )
    shares = [row.provisioned("under") for row in match.rows if row.policy == "ours"]
    assert shares == [0.25]
    old = match.row("kpa")
    assert old is not None
    assert old.provisioned("under") is None


@pytest.mark.parametrize(
    ("share", "text"),
    [
        pytest.param(0.98999, "98.99 %", id="down"),
        pytest.param(0.99, "99.00 %", id="whole"),
        pytest.param(0.9907, "99.07 %", id="as-it-is"),
        pytest.param(1.0, "100.00 %", id="all"),
    ],
)
def test_attainment_is_rounded_down(share: float, text: str) -> None:
    assert attained_percent(share) == text


def test_losses_are_judged_on_shared_seeds() -> None:
    match = _match(ran("ours", 0.99, 10.0, 0), ran("ours", 0.99, 30.0, 1), ran("kpa", 0.99, 12.0, 0))
    assert losses(match) == []  # 12 of the mean of 10 and 30 would be fewer


# -- the page --------------------------------------------------------------------------------------------------------


def test_rows_with_fewer_seeds_are_told() -> None:
    entries = [*(ran("ours", 0.99, 10.0, seed) for seed in range(5)), ran("kpa", 0.99, 12.0)]
    why = preliminary(matches(entries), law_final=True)
    assert "1 of 2 rows have fewer than 5 seeds" in why


def test_the_whole_page(tmp_path: Path) -> None:
    seeds = range(2)
    quiet = [ran("static-peak", 0.999, 120.0, seed, quiet_gpu_hours=60.0) for seed in seeds]
    ours = [ran("ours", 0.9915, 100.0, seed, quiet_gpu_hours=21.0) for seed in seeds]
    oracle = [ran("oracle", 0.99, 95.0, seed, settings={"theta": THETA}) for seed in seeds]
    sweep = [ran(DEAR, 0.999, 150.0, seed) for seed in seeds]
    rest = [ran(BATCHING, 0.9925, 90.0), ran("ours by score", 0.98, 130.0), ran("kpa tuned", 0.995, 140.0)]
    shown = {"profile": "llama-3.1-70b-h100x4", "ttft_s": 2.0, "tpot_s": 0.2, "min": 1, "max": 9, "replicas": 2}
    entries = [
        dataclasses.replace(run, ground={**run.ground, **shown, "requests": 1_000})
        for run in (*ours, *quiet, *oracle, *sweep, *rest)
    ]
    page = tmp_path / "benchmark.md"
    write(page, entries, law_final=True)
    text = page.read_text()
    assert "1 to 2 seeds, as the last column says" in text
    assert "code-x1 −65 %" in text  # 21 of 60 GPU-hours in the quiet hours
    assert "| by score | the score alone says how many | 98.00 |" in text
    assert f"| {DEAR}" not in text.partition("## Every setting")[0]
    assert "| code-x1 | 99.15 | 99.25 | 100.0 | 90.0 | -10.0 % | 1 of 1 | 1 of 1 |" in text
    assert "| attainment of at least 99.0 %" in text
    picture = ElementTree.parse(tmp_path / "benchmark" / "code-x1.svg")
    assert "ours by score" not in {element.text for element in picture.iter()}


def test_swept_margins_are_joined_and_not_labelled() -> None:
    points = [Point(name="ours", gpu_hours=10.0, attainment=0.99, kind="ours")]
    swept = [*points, Point(name="dear", gpu_hours=20.0, attainment=0.999, kind="ours")]
    root = ElementTree.fromstring(pareto("t", points, fluid_gpu_hours=5.0, goal=0.99, swept=swept))
    lines = [element for element in root.iter() if element.get("stroke-dasharray") == "2 3"]
    assert len(lines) == 1
    assert "dear" not in {element.text for element in root.iter()}


def test_first_tokens_of_a_small_model_are_told_beside_the_tuned_rival(tmp_path: Path) -> None:
    shown = {"profile": "llama-3.1-8b-h100x1", "ttft_s": 0.5, "tpot_s": 0.05, "min": 1, "max": 9, "replicas": 2}
    entries = []
    for policy, seconds in {"ours": 0.2, "keda-in-flight": 0.4, "keda-in-flight tuned": 0.3}.items():
        run = ran(policy, 0.99, 1.0, trace="mlarge", ttft_s={"p99": seconds})
        entries.append(dataclasses.replace(run, ground={**run.ground, **shown, "requests": 1_000}))
    page = tmp_path / "benchmark.md"
    write(page, entries)
    assert "mlarge-x1 300 ms with `keda-in-flight tuned`, 200 with ours." in page.read_text()


def test_the_search_is_told(tmp_path: Path) -> None:
    workloads = {"workloads": ["code", "mlarge-x4"], "over_fluid": [2.0, 9.0]}
    rows = [
        {"rival": "kpa", "number": 0, "values": {}, "attained": [0.96, 0.99]},
        {"rival": "kpa", "number": 1, "values": {"target": 3.0}, "attained": [0.99, 0.5]},
        {"rival": "ours", "number": 0, "values": {}, "attained": [0.98, 0.99]},
        {"rival": "ours", "number": 1, "values": {"prediction.z_up": 1.0}, "attained": [0.99, 0.99]},
    ]
    path = tmp_path / "tune.jsonl"
    path.write_text("".join(json.dumps({**row, **workloads}) + "\n" for row in rows))
    lines = list(told(read_log(path)))
    assert "| kpa | 2 | 5.00 | 2.00 | 99.00, 50.00 | target 3 |" in lines
    assert "| ours | 2 | 3.00 | 2.00 | 99.00, 99.00 | prediction.zUp 1 |" in lines
    assert any("`mlarge-x4` ran, and is not scored" in line for line in lines)
    assert list(told(read_log(tmp_path / "none"))) == [
        "No search was logged: the rivals run with their vendors' values."
    ]
