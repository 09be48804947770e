"""What makes a fleet real: nodes, quotas, stuck starts, crashes, blind scrapes, a failing API, routing, clients."""

import math
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from autoscaler.core.policy import Policy, ReplicaBounds, TargetRef
from autoscaler.core.signals import COLUMN
from autoscaler.core.types import GapReason, Outcome, PodPhase, Reason, ScaleReplicas
from autoscaler.errors import ActuationError
from autoscaler.sim.engine import Request
from autoscaler.sim.faults import Blackout, Faults, Symptom, fault_plan
from autoscaler.sim.fleet import Fleet, Settings
from autoscaler.sim.front import Clients, Routing
from autoscaler.sim.ledger import Fate
from autoscaler.sim.profile import Profile
from autoscaler.sim.profiles import profile as shipped
from autoscaler.sim.run import Run, Setting, run
from autoscaler.sim.workload import HOUR, Lengths, requests, steady, step

PROFILE = replace(shipped("llama-3.1-8b-l40sx1"), max_num_batched_tokens=512, cold_start_s=40.0)
"""A replica carries about 4.5 requests a second."""
EPOCH = 1_768_348_800.0


def make(
    traffic: Iterable[Request] = (),
    replicas: int = 1,
    settings: Settings | None = None,
    faults: Faults | None = None,
    profile: Profile = PROFILE,
) -> Fleet:
    rng = np.random.default_rng(1)
    return Fleet(
        profile, traffic, replicas=replicas, epoch=EPOCH, rng=rng, settings=settings, faults=faults or Faults()
    )


def chat(rate: float, duration_s: float, output: float = 200.0) -> Iterable[Request]:
    return requests(np.random.default_rng(2), steady(rate), Lengths(prompt=600.0, output=output), duration_s)


def fates(fleet: Fleet, fate: Fate) -> int:
    return int(np.count_nonzero(fleet.ledger.column("fate") == fate))


# -- starting --------------------------------------------------------------------------------------------------------


def test_without_spread_every_start_takes_the_same_time_up_to_the_next_probe() -> None:
    fleet = make(settings=Settings(cold_start_sigma=0.0, probe_s=15.0))
    fleet.scale(6)
    fleet.advance(46.9)
    assert fleet.status().ready_replicas == 1
    fleet.advance(47.1)  # 2 s to create the container, 40 s to load, found by the third probe
    assert fleet.status().ready_replicas == 6


def test_a_profile_that_knows_its_spread_is_believed_rather_than_the_fleets_settings() -> None:
    fleet = make(settings=Settings(cold_start_sigma=1.5), profile=replace(PROFILE, cold_start_sigma=0.0))
    fleet.scale(6)
    fleet.advance(41.9)
    assert fleet.status().ready_replicas == 1
    fleet.advance(42.1)  # 2 s to create the container, 40 s to load
    assert fleet.status().ready_replicas == 6


def test_a_pod_without_a_free_node_is_unschedulable_until_one_is_provisioned_and_costs_nothing_so_long() -> None:
    fleet = make(settings=Settings(node_probability=1.0, node_s=(200.0, 300.0)))
    fleet.advance(10.0)
    fleet.scale(3)
    fleet.advance(200.0)
    for pod in fleet.status().pods[1:]:
        assert (pod.phase, pod.node, pod.unschedulable_at) == (PodPhase.PENDING, "", EPOCH + 10.0)
    assert fleet.gpu_hours * HOUR == pytest.approx(200.0)
    fleet.advance(311.0)
    assert [pod.unschedulable_at for pod in fleet.status().pods] == [None, None, None]
    assert 311.0 < fleet.gpu_hours * HOUR < 311.0 + 2 * 101.0
    fleet.advance(450.0)
    assert fleet.status().ready_replicas == 3


def test_some_starts_wait_for_a_node_and_others_do_not() -> None:
    fleet = make(settings=Settings(node_probability=0.3))
    fleet.scale(200)
    fleet.advance(5.0)
    homeless = sum(pod.unschedulable_at is not None for pod in fleet.status().pods)
    assert 35 < homeless < 90


def test_beyond_the_quota_pods_wait_until_one_that_drains_has_gone() -> None:
    fleet = make(chat(4.0, 100.0, output=600.0), replicas=3, settings=Settings(quota=3))
    fleet.advance(60.0)
    fleet.scale(2)
    fleet.scale(3)
    fleet.advance(65.0)
    *_, draining, waiting = fleet.status().pods
    assert (draining.terminating, waiting.phase, waiting.unschedulable_at) == (True, PodPhase.PENDING, EPOCH + 60.0)
    fleet.advance(200.0)
    assert [pod.ready for pod in fleet.status().pods] == [True, True, True]
    fleet.scale(5)
    fleet.advance(400.0)
    assert [pod.unschedulable_at is None for pod in fleet.status().pods] == [True, True, True, False, False]
    assert fleet.gpu_hours * HOUR < 3 * 400.0
    fleet.scale(3)  # those without a node go first
    assert [pod.ready for pod in fleet.status().pods] == [True, True, True]


def test_a_stuck_start_hangs_until_its_probe_gives_up_and_may_hang_again() -> None:
    fleet = make(faults=Faults(stuck_probability=1.0, stuck_s=100.0))
    fleet.scale(2)
    fleet.advance(101.0)
    assert [pod.restarts for pod in fleet.status().pods] == [0, 0]
    fleet.advance(350.0)
    assert [(pod.restarts, pod.ready) for pod in fleet.status().pods] == [(0, True), (3, False)]


# -- crashes ---------------------------------------------------------------------------------------------------------


def test_a_crash_loses_what_is_in_flight_and_the_container_loads_anew() -> None:
    fleet = make(chat(3.0, 3000.0), replicas=3, faults=Faults(crash_mean_s=600.0))
    fallen = 0
    for at in range(10, 3001, 10):
        fleet.advance(float(at))
        for pod in fleet.status().pods:
            if not pod.ready:
                fallen += 1
                assert (pod.phase, pod.was_ready, pod.terminating) == (PodPhase.RUNNING, True, False)
    restarts = sum(pod.restarts for pod in fleet.status().pods)
    assert 5 < restarts < 30  # 9000 s of three replicas, less the time they load
    assert 2 * restarts < fallen < 8 * restarts  # some 42 s each
    assert fates(fleet, Fate.KILLED) > restarts
    assert fates(fleet, Fate.DONE) > 8000


def test_a_client_that_tries_again_is_answered_and_has_waited_since_its_first_try() -> None:
    faults, clients = Faults(crash_mean_s=400.0), Clients(retry_s=2.0)
    lost = make(chat(3.0, 2000.0), replicas=4, faults=faults)
    again = make(chat(3.0, 2000.0), replicas=4, faults=faults, settings=Settings(clients=clients))
    for fleet in (lost, again):
        fleet.advance(2000.0)
        fleet.finish()
        assert len(fleet.ledger) == sum(1 for _ in chat(3.0, 2000.0))
    assert fates(lost, Fate.KILLED) > 20
    assert fates(again, Fate.KILLED) < fates(lost, Fate.KILLED) / 4
    assert sorted(again.ledger.column("arrival").tolist()) == [request.arrival for request in chat(3.0, 2000.0)]
    assert np.nanmax(again.ledger.ttft()) > 1.0 > np.nanmax(lost.ledger.ttft())


def test_a_client_whom_no_replica_takes_tries_once_more() -> None:
    fleet = make(chat(2.0, 100.0), replicas=0, settings=Settings(clients=Clients(retry_s=30.0)))
    fleet.scale(1)
    fleet.advance(300.0)
    arrival, fate = fleet.ledger.column("arrival"), fleet.ledger.column("fate")
    served_from = float(fleet.status().pods[0].ready_at or math.nan) - EPOCH + 1.5
    assert 0 < fates(fleet, Fate.REFUSED) < np.count_nonzero(arrival < served_from - 10.0)
    assert np.all(fate[arrival > served_from - 14.0] == Fate.DONE)  # the shortest pause is 15 s


@pytest.mark.parametrize("routing", [Routing.LEAST_OUTSTANDING, Routing.SHARED_QUEUE])
def test_a_client_whose_answer_is_not_whole_in_time_goes_away_and_frees_its_place(routing: Routing) -> None:
    clients = Clients(total_timeout_s=20.0)
    fleet = make(chat(1.5, 60.0, output=600.0), replicas=1, settings=Settings(clients=clients, routing=routing))
    fleet.advance(90.0)
    took = fleet.ledger.column("finish") - fleet.ledger.column("arrival")
    gone = fleet.ledger.column("fate") == Fate.TIMED_OUT
    assert len(fleet.ledger) == sum(1 for _ in chat(1.5, 60.0, output=600.0))
    assert 10 < np.count_nonzero(gone) < len(gone) - 10
    assert np.all((took[gone] >= 20.0) & (took[gone] < 20.3))  # at the end of the iteration under way
    assert np.all(took[~gone] < 20.3)
    (engine,) = fleet.engines()
    assert (engine.outstanding, engine.context_tokens, engine.free_blocks) == (0, 0, PROFILE.blocks - 1)
    assert engine.tallies.aborted == np.count_nonzero(gone)


@pytest.mark.parametrize("skew_s", [30.0, -30.0])
def test_stamps_are_what_the_clusters_clock_says(skew_s: float) -> None:
    plain, skewed = make(), make(faults=Faults(clock_skew_s=skew_s))
    for fleet in (plain, skewed):
        fleet.advance(10.0)
        fleet.scale(2)
        fleet.advance(100.0)
    for right, wrong in zip(plain.status().pods, skewed.status().pods, strict=True):
        assert right.ready_at is not None
        assert (wrong.created_at, wrong.ready_at) == (right.created_at + skew_s, right.ready_at + skew_s)
    assert column(skewed, "started_at") == [at + skew_s for at in column(plain, "started_at")]
    assert column(skewed, "read_at") == column(plain, "read_at"), "reading is by the daemon's clock"


# -- reading ---------------------------------------------------------------------------------------------------------


def column(fleet: Fleet, name: str, stale_after_s: float = 15.0) -> list[float]:
    engines = fleet.reading(stale_after_s).engines
    assert engines is not None
    return [float(value) for value in engines.values[:, COLUMN[name]]]


def test_pages_that_do_not_answer_age_until_they_are_missing() -> None:
    blackout = Blackout(start_s=100.0, duration_s=60.0)
    fleet = make(chat(4.0, 300.0), replicas=2, faults=Faults(blackouts=(blackout,)))
    fleet.advance(95.0)
    assert column(fleet, "read_at") == [EPOCH + 95.0] * 2
    fleet.advance(105.0)
    assert column(fleet, "read_at") == [EPOCH + 95.0] * 2
    gaps = fleet.reading(15.0).gaps
    assert [(gap.signal, gap.reason, gap.source) for gap in gaps] == [("*", GapReason.TIMEOUT, "vllm")] * 2
    fleet.advance(115.0)
    assert column(fleet, "read_at") == []
    fleet.advance(160.0)
    assert column(fleet, "read_at") == [EPOCH + 160.0] * 2
    assert fleet.reading(15.0).gaps == ()


def test_a_share_of_the_pods_can_be_blind() -> None:
    blackout = Blackout(start_s=0.0, duration_s=60.0, share=0.4)
    fleet = make(replicas=200, faults=Faults(blackouts=(blackout,)))
    fleet.advance(10.0)
    assert 90 < len(column(fleet, "read_at")) < 150


def test_frozen_pages_are_fresh_and_do_not_move() -> None:
    blackout = Blackout(start_s=100.0, duration_s=60.0, symptom=Symptom.FROZEN)
    fleet = make(chat(4.0, 300.0), faults=Faults(blackouts=(blackout,)))
    tokens = []
    for at in (95.0, 130.0, 155.0, 165.0):
        fleet.advance(at)
        tokens += column(fleet, "generation_tokens")
        assert column(fleet, "read_at") == [EPOCH + at]
        assert fleet.reading(15.0).gaps == ()
    assert tokens[0] == tokens[1] == tokens[2] < tokens[3]


def test_gauges_that_read_nan_are_gaps() -> None:
    blackout = Blackout(start_s=0.0, duration_s=60.0, symptom=Symptom.NAN)
    fleet = make(chat(4.0, 300.0), faults=Faults(blackouts=(blackout,)))
    fleet.advance(50.0)
    assert math.isnan(column(fleet, "kv_cache_usage")[0])
    assert column(fleet, "generation_tokens")[0] > 0.0
    assert {gap.signal for gap in fleet.reading(15.0).gaps} == {
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage",
    }
    fleet.advance(60.0)
    assert column(fleet, "kv_cache_usage")[0] > 0.0


def test_pods_can_be_scraped_each_in_its_own_phase() -> None:
    fleet = make(chat(10.0, 300.0), replicas=8, settings=Settings(scrape_s=15.0))
    read_at = []
    for at in (100.0, 110.0, 115.0):
        fleet.advance(at)
        read_at.append(column(fleet, "read_at", math.inf))
    assert len({round(time % 15.0, 2) for time in read_at[0]}) == 8
    assert all(EPOCH + 85.0 <= time <= EPOCH + 100.0 for time in read_at[0])
    assert read_at[2] == pytest.approx([time + 15.0 for time in read_at[0]])
    assert any(early == late for early, late in zip(read_at[0], read_at[1], strict=True))


# -- writing ---------------------------------------------------------------------------------------------------------


def test_writes_fail_in_all_the_ways_that_they_do() -> None:
    fleet = make(faults=Faults(api_errors=0.5))
    seen: list[tuple[str, bool]] = []
    for _ in range(400):
        before = fleet.spec_replicas
        try:
            outcome = fleet.act(ScaleReplicas(seen=before, to=3 - before))
            assert outcome is Outcome.APPLIED
            seen.append(("", fleet.spec_replicas != before))
        except ActuationError as error:
            seen.append((error.reason, fleet.spec_replicas != before))
    assert 150 < seen.count(("", True)) < 250
    assert 25 < seen.count(("conflict", False)) < 75
    assert 60 < seen.count(("unreachable", False)) < 140
    assert 25 < seen.count(("unreachable", True)) < 75  # no answer came, and it was done


# -- routing ---------------------------------------------------------------------------------------------------------


def counts(routing: Routing, rate: float = 9.0) -> list[int]:
    """Return how many first tokens each of three replicas gave."""
    fleet = make(chat(rate, 200.0), replicas=3, settings=Settings(routing=routing))
    fleet.advance(400.0)
    return [sum(engine.tallies.ttft.counts) for engine in fleet.engines()]


def test_round_robin_gives_each_the_same_number() -> None:
    shares = counts(Routing.ROUND_ROBIN)
    assert sum(shares) > 1500
    assert max(shares) - min(shares) <= 1


def test_the_better_of_two_at_random_spreads_evenly_but_not_exactly() -> None:
    shares = counts(Routing.POWER_OF_TWO)
    assert sum(shares) > 1500
    assert 1 < max(shares) - min(shares) < 0.15 * sum(shares)
    assert shares != counts(Routing.LEAST_OUTSTANDING)


def test_a_newcomer_takes_over_what_waits_in_a_shared_queue() -> None:
    waits = {}
    for routing in (Routing.LEAST_OUTSTANDING, Routing.SHARED_QUEUE):
        settings = Settings(routing=routing, cold_start_sigma=0.0)
        fleet = make(chat(12.0, 60.0), settings=settings, profile=replace(PROFILE, max_num_seqs=64))
        fleet.scale(4)
        fleet.advance(42.0)
        in_flight, queued = fleet.samples[-1].in_flight, sum(engine.outstanding for engine in fleet.engines())
        samples = fleet.reading(15.0).samples
        if routing is Routing.SHARED_QUEUE:
            assert queued == 64
            assert [(sample.signal, sample.value) for sample in samples] == [("upstream_queue", in_flight - 64)]
            assert in_flight > 150
        else:
            assert queued == in_flight > 150
            assert samples == ()
        fleet.advance(60.0)
        fleet.finish()
        assert len(fleet.ledger) == sum(1 for _ in chat(12.0, 60.0))
        waits[routing] = float(np.nanquantile(fleet.ledger.ttft(), 0.95))
    assert waits[Routing.SHARED_QUEUE] < 0.9 * waits[Routing.LEAST_OUTSTANDING]


def test_who_waits_too_long_in_a_shared_queue_goes_away() -> None:
    settings = Settings(routing=Routing.SHARED_QUEUE, slots=32, clients=Clients(ttft_timeout_s=10.0))
    fleet = make(chat(15.0, 120.0), settings=settings)
    fleet.advance(200.0)
    assert len(fleet.ledger) == sum(1 for _ in chat(15.0, 120.0))
    assert fates(fleet, Fate.TIMED_OUT) > 300
    assert np.nanmax(fleet.ledger.ttft()) <= 10.0
    gone = fleet.ledger.column("fate") == Fate.TIMED_OUT
    waited = (fleet.ledger.column("finish") - fleet.ledger.column("arrival"))[gone]
    assert np.all(waited >= 10.0 - 1e-9)


def test_a_request_that_can_never_fit_is_no_matter_of_trying_again() -> None:
    settings = Settings(clients=Clients(retry_s=1.0))
    for chosen in (Settings(), settings, replace(settings, routing=Routing.SHARED_QUEUE)):
        fleet = make([Request(1.0, 10_000_000, 10), Request(2.0, 100, 10)], settings=chosen)
        fleet.advance(60.0)
        assert (fates(fleet, Fate.TOO_LONG), fates(fleet, Fate.DONE)) == (1, 1)


# -- chance ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "faults"),
    [
        pytest.param(Settings(routing=Routing.POWER_OF_TWO), Faults(), id="routing"),
        pytest.param(Settings(clients=Clients(retry_s=1.0)), Faults(), id="retries"),
        pytest.param(Settings(scrape_s=15.0), Faults(), id="scrapes"),
        pytest.param(Settings(), Faults(api_errors=1.0), id="api-errors"),
        pytest.param(Settings(), Faults(crash_mean_s=100.0), id="crashes"),
        pytest.param(Settings(node_probability=0.5), Faults(), id="nodes"),
        pytest.param(Settings(), Faults(stuck_probability=0.2), id="stuck"),
        pytest.param(Settings(), Faults(clock_skew_s=-40.0), id="clock-skew"),
    ],
)
def test_no_option_shifts_names_or_the_starts_of_others(settings: Settings, faults: Faults) -> None:
    plain, other = make(replicas=2), make(replicas=2, settings=settings, faults=faults)
    starts = []
    for fleet in (plain, other):
        fleet.advance(10.0)
        try:
            fleet.act(ScaleReplicas(seen=2, to=30))
        except ActuationError:
            fleet.scale(30)
        ready: dict[str, float] = {}
        for second in range(11, 150):
            fleet.advance(float(second))
            for pod in fleet.status().pods:
                if pod.ready and pod.restarts == 0:
                    ready.setdefault(pod.name, float(second))
        starts.append(ready)
    assert [pod.name for pod in plain.status().pods] == [pod.name for pod in other.status().pods]
    both = starts[0].keys() & starts[1].keys()
    alike = sum(starts[0][name] == starts[1][name] for name in both)
    assert len(both) > 10
    # a node that comes late, or a second try after a hang, moves only its own pod
    assert alike >= len(both) - (6 if settings.node_probability else 0)


# -- the plan of faults ----------------------------------------------------------------------------------------------

POLICY = Policy(
    name="chat", target=TargetRef(namespace="serving", deployment="chat"), replicas=ReplicaBounds(min=1, max=10)
)


def falling(faults: Faults) -> Run:
    """Return a run in which two thirds of the work are gone at 900 s: fewer replicas would do from then on."""
    traffic = requests(np.random.default_rng(4), step(9.0, 3.0, 900.0), Lengths(prompt=800.0, output=300.0), 2700.0)
    fleet = Settings(clients=Clients(retry_s=1.0))
    return run(POLICY, traffic, Setting(profile=PROFILE, replicas=3, duration_s=2700.0, fleet=fleet, faults=faults))


def test_in_the_fault_plan_nothing_shrinks_while_no_page_answers() -> None:
    start, end = 1080.0, 1680.0
    sound, faulty = falling(Faults()), falling(fault_plan(start))
    epoch = sound.rows[0].at

    def shrunk(result: Run) -> list[float]:
        return [row.at - epoch for row in result.rows if row.acted_to is not None and row.acted_to < row.ordered]

    assert any(start + 15.0 < at < end for at in shrunk(sound))
    assert not any(start + 15.0 < at <= end for at in shrunk(faulty))
    assert any(at > end for at in shrunk(faulty))
    blind = [row for row in faulty.rows if start + 15.0 < row.at - epoch < end]
    assert {row.reason for row in blind} <= {Reason.NO_DATA, Reason.INSUFFICIENT_COMPONENTS}
    ordered = [row.ordered for row in blind]
    assert all(after >= before for before, after in pairwise(ordered))
    assert faulty.figures.attainment is not None
    assert sound.figures.attainment is not None
    assert faulty.figures.failed <= 0.002 * faulty.figures.requests
    assert any(row.outcome == Outcome.FAILED for row in faulty.rows)
