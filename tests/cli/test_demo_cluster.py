"""The pure parts of `autoscaler demo --cluster`; the whole is in tests/cluster."""

import base64
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import yaml

from autoscaler.cli.demo import demo_policy
from autoscaler.cli.demo_cluster import POLICY, ClusterDemo, is_time_to_kill, judge
from autoscaler.cli.demo_daemons import Daemon, Follower, recording_of, token_id
from autoscaler.cli.demo_place import Place, deployment_of, rights_of, served_policy
from autoscaler.cli.main import run
from autoscaler.policy_file import load_policies, shipped_policies
from autoscaler.sim.report import TickRow
from autoscaler.sim.scenario import rush_scenario
from autoscaler.testbed.api import Api
from autoscaler.testbed.audit import Scaling, Written
from autoscaler.testbed.plane import EndedError, Plane, Process
from autoscaler.testbed.simulated import Traffic
from autoscaler.trace import TickLine, read_trace

DEFAULT = load_policies([shipped_policies() / "default.yaml"]).policies["default"]
HURRIED = load_policies([POLICY]).policies["demo-cluster"]
GOLDEN = Path(__file__).parents[1] / "golden"


def test_the_policy_is_the_default_law_in_a_hurry() -> None:
    assert (HURRIED.score.weights, HURRIED.slo, HURRIED.sizing) == (DEFAULT.score.weights, DEFAULT.slo, DEFAULT.sizing)
    for step in ("scale_up", "scale_down"):
        assert getattr(HURRIED, step).threshold == getattr(DEFAULT, step).threshold
    # A standby takes over 15 s after it saw the last renewal, and looks every second.
    assert HURRIED.up_cooldown_s > 15.0 + 2.0


@pytest.mark.parametrize(
    "signals",
    [
        pytest.param({}, id="none"),
        pytest.param({"vllm": None, "dcgm": {"urls": ["http://dcgm:9400/metrics"]}}, id="only-dcgm"),
        pytest.param({"vllm": {"prometheus": "http://prometheus:9090", "timeout": "1s"}}, id="prometheus"),
    ],
)
def test_the_policy_reads_the_pods_themselves(tmp_path: Path, signals: dict[str, object]) -> None:
    document = yaml.safe_load(POLICY.read_text())
    document["spec"]["signals"] = signals
    file = tmp_path / "policy.yaml"
    file.write_text(served_policy(yaml.safe_dump(document), 1234))
    policy = demo_policy(file)
    assert policy.signals.vllm is not None
    assert (policy.signals.vllm.port, policy.signals.vllm.prometheus, policy.signals.dcgm) == (1234, None, None)
    assert replace(policy, signals=HURRIED.signals) == HURRIED


@pytest.mark.parametrize(
    ("record", "name", "expected"),
    [
        pytest.param("demo.trace.gz", "a", "demo.trace.gz", id="leader"),
        pytest.param("demo.trace.gz", "b", "demo-b.trace.gz", id="standby"),
        pytest.param("out/demo", "b", "out/demo-b", id="no-suffix"),
    ],
)
def test_each_daemon_has_a_recording_of_its_own(record: str, name: str, expected: str) -> None:
    assert recording_of(Path(record), name) == Path(expected)


def test_a_token_says_its_id() -> None:
    payload = base64.urlsafe_b64encode(json.dumps({"jti": "4f0c", "sub": "x"}).encode()).rstrip(b"=").decode()
    assert token_id(f"header.{payload}.signature") == "4f0c"


def test_the_account_has_exactly_what_deploy_grants() -> None:
    deploy = Path(__file__).parents[2] / "deploy"
    documents = [
        item
        for folder in ("base", "overlays/live", "components/gentle")
        for path in (deploy / folder).glob("*.yaml")
        for item in yaml.safe_load_all(path.read_text())
        if isinstance(item, dict)
    ]
    rules = [rule for item in documents if item.get("kind") == "Role" for rule in item["rules"]]
    granted = {(g, r, v) for rule in rules for g in rule["apiGroups"] for r in rule["resources"] for v in rule["verbs"]}
    assert rights_of(HURRIED) == granted


def test_the_pods_ask_for_what_the_profile_needs() -> None:
    scenario = rush_scenario()
    template = deployment_of("llama", scenario)["spec"]["template"]
    (container,) = template["spec"]["containers"]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": "1"}}
    assert container["args"] == ["--max-num-seqs", "256", "--max-num-batched-tokens", "512"]
    assert template["metadata"]["annotations"] == {"fake-kubelet/cold-start-seconds": "6"}


def row(at: float, ordered: int, to: int | None, outcome: str = "applied") -> TickRow:
    unknown = dict.fromkeys(("demand", "forecast", "score", "memory", "backlog", "latency", "waiting", "kv_usage"))
    return TickRow(
        at=rush_scenario().epoch + at,
        ordered=ordered,
        ready=ordered,
        acted_to=to,
        outcome=outcome,
        reason="up_demand",
        why="",
        steps=(),
        **unknown,
    )


@pytest.mark.parametrize(
    ("rows", "at", "expected"),
    [
        pytest.param([row(30.0, 1, 2)], 70.0, False, id="a-step-too-early"),
        pytest.param([row(65.0, 1, 2)], 66.0, False, id="not-yet-saved"),
        pytest.param([row(65.0, 1, 2)], 67.0, True, id="after-a-step"),
        pytest.param([row(65.0, 3, 2)], 67.0, False, id="a-step-down"),
        pytest.param([row(65.0, 1, 2, "failed")], 67.0, False, id="nothing-was-written"),
        pytest.param([], 108.0, True, id="late"),
    ],
)
def test_the_leader_is_killed_soon_after_a_step_up(rows: list[TickRow], at: float, expected: bool) -> None:
    assert is_time_to_kill(rows, at, rush_scenario(duration_s=180.0)) is expected


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[ClusterDemo]:
    """Return a run of three minutes with two daemons that only sleep."""
    scenario, hands = rush_scenario(duration_s=180.0), Hands()
    traffic = Traffic(scenario.profile, (), bin_s=10.0, now=hands)
    traffic.begin()
    hands.at = 67.0
    traffic.advance()
    processes = [Process(f"daemon-{name}", ("sleep", "600"), tmp_path) for name in "ab"]
    daemons = [
        Daemon(name, process, tmp_path / name, Follower(tmp_path / name), name)
        for name, process in zip("ab", processes, strict=True)
    ]
    for process in processes:
        process.start()
    place = Place(cast(Plane, None), cast(Api, None), "demo", "llama")
    yield ClusterDemo(place, HURRIED, scenario, traffic, daemons, "v1")
    for process in processes:
        process.kill()


class Hands:
    """A clock."""

    at = 0.0

    def __call__(self) -> float:
        return self.at


def test_the_standby_leads_when_the_leader_has_been_killed_after_a_step(demo: ClusterDemo) -> None:
    leader, standby = (daemon.process for daemon in demo.daemons)
    demo.act()
    assert leader.pid
    demo.collector.rows.append(replace(row(0.0, 1, 2), at=demo.began + 65.0))
    demo.act()
    assert not leader.pid
    assert standby.pid
    demo.act()
    assert [event.text for event in demo.story] == ["the leader, a, is killed (SIGKILL)"]
    standby.log.write_text('{"event": "standing_by"}\n{"event": "leading"}\n{"event": "lead')
    demo.act()
    assert [event.text for event in demo.story][1:] == ["b leads, 0 s later"]


def test_a_daemon_that_ends_by_itself_is_told_with_its_log(demo: ClusterDemo) -> None:
    demo.daemons[1].process.kill()
    demo.daemons[1].process.log.write_text("no disk")
    with pytest.raises(EndedError, match="daemon-b ended:\nno disk"):
        demo.act()


def seen(*scalings: tuple[str, int], refused: int = 0, others: tuple[str, ...] = ()) -> Written:
    found = tuple(Scaling(str(index), who, to) for index, (who, to) in enumerate(scalings))
    return Written(scalings=found, more={"leases": 3}, refused=refused, others=others)


@pytest.mark.parametrize(
    ("found", "good", "said"),
    [
        pytest.param(seen(), True, "0 changes of replicas, all within 1 to 8: none", id="nothing"),
        pytest.param(seen(("a", 2)), True, "1 change of replicas, all within 1 to 8: 2", id="one"),
        pytest.param(seen(("a", 2), ("a", 4), ("b", 5)), True, "2 by a, then 1 by b", id="a-takeover"),
        pytest.param(seen(("a", 2), ("b", 4), ("a", 5)), False, "1 by a, then 1 by b, then 1 by a", id="two-writers"),
        pytest.param(seen(("b", 2), ("a", 4)), False, "1 by b, then 1 by a", id="the-dead-wrote"),
        pytest.param(seen(("a", 9)), False, "1 OUTSIDE 1 to 8: 9", id="outside"),
        pytest.param(seen(("a", 2), refused=1), False, "1 refused", id="refused"),
        pytest.param(seen(("a", 2), others=("hpa",)), False, "others who moved the replicas: hpa", id="others"),
    ],
)
def test_what_was_written_is_judged(found: Written, good: bool, said: str) -> None:
    findings = judge(found, HURRIED, ["a", "b"])
    assert findings.good is good
    assert any(said in line for line in findings.lines)


def test_a_recording_is_followed_while_it_grows_and_decided_as_it_was(tmp_path: Path) -> None:
    whole = (GOLDEN / "rush.trace.gz").read_bytes()
    with read_trace(GOLDEN / "rush.trace.gz", decisions=False) as reader:
        recorded = [line for line in reader if isinstance(line, TickLine)]
    at_once = Follower(GOLDEN / "rush.trace.gz").new()
    growing = tmp_path / "growing.trace.gz"
    follower = Follower(growing)
    assert follower.new() == []
    followed = []
    for end in (10, len(whole) // 3, len(whole) // 3, len(whole) // 2, len(whole)):
        growing.write_bytes(whole[:end])
        followed.append(follower.new())
    assert followed[0] == followed[2] == []
    assert all(map(len, (followed[1], followed[3], followed[4])))
    ticks = [tick for part in followed for tick in part]
    assert [snapshot.at for snapshot, _, _ in ticks] == [line.snapshot.at for line in recorded]
    assert [outcome for _, _, outcome in ticks] == [line.outcome for line in recorded]
    assert [decision for _, decision, _ in ticks] == [decision for _, decision, _ in at_once]


@pytest.mark.parametrize("option", ["--report", "--record"])
def test_where_nothing_can_be_written_is_said_at_once(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "none" / "file"
    assert run(["demo", "--cluster", option, str(path)]) == 1
    assert capsys.readouterr().err == f"error: cannot write {path}: {path.parent} is no folder\n"


def test_without_the_commands_it_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(tmp_path))
    assert run(["demo", "--cluster"]) == 1
    said = capsys.readouterr().err
    assert "no etcd, kube-apiserver" in said
    assert "`make cluster-tools`" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("words", [["--cluster", "--hours", "3"], ["--minutes", "3"]], ids=["hours", "minutes"])
def test_the_two_kinds_of_time_are_not_mixed(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["demo", *words]) == 2
    assert "with --cluster" in capsys.readouterr().err
