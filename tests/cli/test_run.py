"""`autoscaler run`: as a process that a person or a kubelet starts and ends, and in this one where that tells more."""

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import urllib.request
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.error import HTTPError

import pytest
import structlog
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from autoscaler.cli.main import run
from autoscaler.cli.wiring import FirstTicks, Watchers, fingerprint, open_recorder, recordable
from autoscaler.core.policy import PrometheusServer, Signals
from autoscaler.core.types import Outcome, TargetStatus
from autoscaler.core.victims import ANNOTATION
from autoscaler.errors import TraceError
from autoscaler.loop import Parts
from autoscaler.policy_file import policy_from_plain, policy_to_plain
from autoscaler.sources.deployment import RIGHTS, DeploymentTarget
from autoscaler.telemetry import Telemetry
from autoscaler.trace import read_trace
from autoscaler.web.server import Health
from tests.cli.cluster import PODS, Cluster, cluster
from tests.core.world import P0, World
from tests.fake_api import Fault
from tests.fake_ports import ManualClock, WorldSource, WorldTarget

ENTRY = (sys.executable, "-c", "from autoscaler.cli import main; main()", "run")
WATCHED = ("deployments", "replicasets", "pods", "horizontalpodautoscalers")
READING = {f"{verb} {kind}" for verb in ("list", "watch") for kind in WATCHED}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Return a cluster for all tests of this file, which leave it as they found it."""
    with cluster(tmp_path_factory.mktemp("cluster")) as one:
        yield one


@pytest.fixture
def world(shared: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Return the cluster with a folder of its own for policies, and with no request seen yet."""
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST", "DRY_RUN", "LOG_LEVEL"):
        monkeypatch.delenv(name, raising=False)
    shared.folder = tmp_path
    shared.api.requests.clear()
    replicas = shared.api.deployment["spec"]["replicas"] if shared.api.deployment else PODS
    rights = shared.api.rights
    yield shared
    shared.api.rights = rights
    shared.api.faults.clear()
    if shared.api.deployment is not None:
        shared.api.deployment["spec"]["replicas"] = replicas


@pytest.fixture(autouse=True)
def _restored_logging() -> Iterator[None]:
    """Undo what `configure_logging` does to the process."""
    root = logging.getLogger()
    handlers, level, hook = root.handlers[:], root.level, sys.excepthook
    yield
    root.handlers[:], sys.excepthook = handlers, hook
    root.setLevel(level)
    structlog.reset_defaults()


def events(out: str, event: str = "") -> list[dict[str, Any]]:
    """Return the JSON lines of a log, of one event or all of them."""
    lines = [json.loads(line) for line in out.splitlines()]
    return [line for line in lines if event in ("", line["event"])]


class Daemon:
    """`autoscaler run` as a process of its own, its log read line by line."""

    def __init__(self, world: Cluster, *arguments: str, env: Mapping[str, str] | None = None) -> None:
        self._arguments = [*ENTRY, "--kubeconfig", world.kubeconfig, "--listen", "127.0.0.1:0", *arguments]
        self._env = {**os.environ, **(env or {})}
        self.seen: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        self.process = subprocess.Popen(
            self._arguments, env=self._env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()

    def until(self, event: str, count: int = 1) -> list[dict[str, Any]]:
        """Return the first lines of an event, so many; wait for them."""
        assert self.process.stdout is not None
        found = [line for line in self.seen if line["event"] == event]
        while len(found) < count:
            line = self.process.stdout.readline()
            assert line, f"the log ended before {count} x {event}: {self.seen}"
            self.seen.append(json.loads(line))
            if self.seen[-1]["event"] == event:
                found.append(self.seen[-1])
        return found[:count]

    def end(self, number: signal.Signals) -> int:
        """Send a signal, and return the exit code; negative when the signal itself ended it."""
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=60)
        self.seen += events(out) if number is not signal.SIGKILL else []
        assert err == ""
        return self.process.returncode


def get(url: str) -> tuple[int, str]:
    """Return status and body of a page."""
    try:
        with urllib.request.urlopen(url, timeout=30) as response:
            return response.status, response.read().decode()
    except HTTPError as error:
        with error:
            return error.code, error.read().decode()


def invoke(world: Cluster, *arguments: str) -> int:
    """Run `autoscaler run --once` in this process; return its exit code."""
    return run(["run", *arguments, "--once", "--kubeconfig", world.kubeconfig])


# --- as a process ---------------------------------------------------------------------------------------------------


def test_c152_a_dry_run_from_start_to_sigterm(
    world: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "run.trace.gz"
    # The bounds ask for more replicas than there are: a step is decided, and only simulated.
    policy = world.policy(replicas="{min: 4, max: 8}")
    with Daemon(world, str(policy), "--dry-run", "--record", str(trace)) as daemon:
        (started,) = daemon.until("started")
        decisions = daemon.until("decision", 3)
        assert (started["dry_run"], started["policies"]) == (True, ["chat"])
        url = started["listen"]
        status, metrics = get(f"{url}/metrics")
        assert status == 200
        assert 'autoscaler_current_replicas{policy="chat"} 2.0' in metrics
        assert 'autoscaler_dry_run{policy="chat"} 1.0' in metrics
        assert get(f"{url}/readyz")[0] == 200
        status, health = get(f"{url}/healthz")
        assert (status, json.loads(health)["policies"]["chat"]["completed"]) == (200, True)
        assert daemon.end(signal.SIGTERM) == 0
    assert daemon.seen[-1]["event"] == "stopped"
    first = decisions[0]
    assert (first["target"], first["current_replicas"], first["ready_replicas"]) == ("serving/chat", 2, 2)
    assert (first["action"], first["desired_replicas"], first["outcome"]) == ("scale_up", 4, "simulated")
    assert first["dry_run"] is True
    assert first["gaps"] == {}
    assert {"score", "demand", "forecast", "reason", "steps", "unblocks", "duration_s", "at"} <= first.keys()
    assert set(world.api.verbs()) == READING  # of which none writes
    assert world.api.deployment is not None
    assert world.api.deployment["spec"]["replicas"] == 2
    assert run(["replay", str(trace), "--verify"]) == 0
    assert "recorded decisions come out bit-equal" in capsys.readouterr().out


def test_killed_in_mid_record_the_recording_holds_every_reported_tick(
    world: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "run.trace.gz"
    with Daemon(world, str(world.policy()), "--dry-run", "--record", str(trace)) as daemon:
        reported = daemon.until("decision", 3)
        assert daemon.end(signal.SIGKILL) == -signal.SIGKILL
    with read_trace(trace, decisions=True) as reader:
        lines = list(reader)
        assert reader.torn is not None
    assert [line.snapshot.at for line in lines[1:4]] == [line["at"] for line in reported]  # type: ignore[union-attr]
    assert run(["replay", str(trace), "--verify"]) == 0
    assert "note: line" in capsys.readouterr().out


def test_a_target_that_does_not_exist_is_said_and_a_changed_file_is_taken_up(world: Cluster) -> None:
    world.policy("ghost", deployment="ghost")
    with Daemon(world, str(world.folder / "policies"), "--dry-run") as daemon:
        (failed,) = daemon.until("tick_failed")
        assert (failed["policy"], failed["kind"]) == ("ghost", "target")
        assert "target_not_found" in failed["detail"]
        assert 'deployments.apps "ghost" not found' in failed["detail"]
        url = daemon.until("started")[0]["listen"]
        world.policy("chat")
        decisions = daemon.until("decision", 2)
        assert {line["policy"] for line in decisions} == {"chat"}
        assert daemon.until("policies_reloaded")[0]["result"] == "applied"
        assert get(f"{url}/healthz")[0] == 200  # a target that is not there is no reason to be restarted
        metrics = get(f"{url}/metrics")[1]
        assert 'autoscaler_tick_errors_total{kind="target_not_found",policy="ghost"}' in metrics
        assert daemon.end(signal.SIGINT) == 0
    assert len([line for line in daemon.seen if line["event"] == "tick_failed"]) == 1  # no flood


def test_sigterm_ends_it_while_the_api_server_hangs(world: Cluster) -> None:
    world.api.faults["list deployments"] = [Fault(hang=True)] * 9
    with Daemon(world, str(world.policy()), "--dry-run") as daemon:
        daemon.until("tick_failed")
        assert daemon.end(signal.SIGTERM) == 0


# --- once -----------------------------------------------------------------------------------------------------------


def test_once_is_one_line_of_json_and_exit_0(world: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(world, str(world.policy()), "--dry-run") == 0
    out, err = capsys.readouterr()
    (decision,) = events(out, "decision")
    assert (decision["policy"], decision["action"], decision["ready_replicas"]) == ("chat", "hold", 2)
    assert err == ""


@pytest.mark.parametrize(
    ("arguments", "replicas", "outcome"),
    [
        pytest.param([], 4, "applied", id="live"),
        pytest.param(["--dry-run"], 2, "simulated", id="dry-run"),
    ],
)
def test_c152_live_writes_what_a_dry_run_only_says(
    arguments: list[str], replicas: int, outcome: str, world: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(world, str(world.policy(replicas="{min: 4, max: 8}")), *arguments) == 0
    (decision,) = events(capsys.readouterr().out, "decision")
    assert (decision["action"], decision["desired_replicas"], decision["outcome"]) == ("scale_up", 4, outcome)
    assert world.api.deployment is not None
    assert world.api.deployment["spec"]["replicas"] == replicas
    writes = [request.resource for request in world.api.requests if request.verb not in ("get", "list", "watch")]
    assert writes == (["deployments/scale", "events"] if outcome == "applied" else [])


@pytest.mark.parametrize(
    ("victims", "arguments", "written"),
    [
        pytest.param("emptiest", [], ["pods", "deployments/scale", "events"], id="live"),
        pytest.param("emptiest", ["--dry-run"], [], id="dry-run"),
        pytest.param("cluster", [], ["deployments/scale", "events"], id="left to the cluster"),
    ],
)
def test_c112_pods_are_marked_only_where_the_policy_asks_for_it_and_never_in_a_dry_run(
    victims: str, arguments: list[str], written: list[str], world: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    for item in world.api.pods:  # both have been marked before, and only one goes
        item["metadata"]["annotations"] = {ANNOTATION: "-1"}
    policy = world.policy(replicas="{min: 1, max: 1}", more=f"  scaleDown: {{victims: {{order: {victims}}}}}\n")
    assert invoke(world, str(policy), *arguments) == 0
    (decision,) = events(capsys.readouterr().out, "decision")
    assert (decision["action"], decision["desired_replicas"]) == ("scale_down", 1)
    assert len(decision.get("deletion_costs", ())) == (victims == "emptiest")
    writes = [request.resource for request in world.api.requests if request.verb not in ("get", "list", "watch")]
    assert writes == written
    marked = [item for item in world.api.pods if item["metadata"].pop("annotations")]
    assert len(marked) == PODS - written.count("pods")


def test_c152_a_policy_that_says_dry_run_writes_nothing_either(
    world: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(world, str(world.policy(replicas="{min: 4, max: 8}", more="  dryRun: true\n"))) == 0
    (decision,) = events(capsys.readouterr().out, "decision")
    assert (decision["outcome"], decision["dry_run"]) == ("simulated", True)
    assert set(world.api.verbs()) == READING


def test_once_fails_for_a_target_that_cannot_be_read_and_ticks_the_others(
    world: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    world.policy("ghost", deployment="ghost")
    world.policy("chat")
    assert invoke(world, str(world.folder / "policies"), "--dry-run") == 1
    out, err = capsys.readouterr()
    assert [line["policy"] for line in events(out, "decision")] == ["chat"]
    assert err.startswith('error: policy ghost: target_not_found: deployments.apps "ghost" not found')
    assert len(err.splitlines()) == 1


def test_once_with_pages_that_cannot_be_read_is_a_tick_with_gaps(
    world: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]  # nothing listens there
        policy = world.policy(more=f"  signals: {{vllm: {{port: {port}}}}}\n")
        assert invoke(world, str(policy)) == 0
    (decision,) = events(capsys.readouterr().out, "decision")
    assert (decision["action"], decision["reason"]) == ("hold", "no_data")
    assert decision["gaps"]["unreachable"]["count"] == PODS
    assert set(world.api.verbs()) == READING


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(["--lease", "autoscaler"], "'autoscaler' must be NAMESPACE/NAME", id="no namespace"),
        pytest.param(["--lease", "a/b/c"], "'a/b/c' must be NAMESPACE/NAME", id="too much"),
        pytest.param(["--lease", "/b"], "'/b' must be NAMESPACE/NAME", id="empty namespace"),
        pytest.param(["--lease", "serving/autoscaler"], "--once cannot wait for a --lease", id="with once"),
        pytest.param(["--lease-duration", "4s"], "'4s' must be from 5s to 3600s", id="short"),
        pytest.param(["--lease-duration", "2h"], "'2h' must be from 5s to 3600s", id="long"),
        pytest.param(["--lease-duration", "soon"], "'soon' must be a duration", id="no duration"),
    ],
)
def test_a_lease_that_cannot_be_is_bad_input(
    arguments: list[str], words: str, world: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(world, str(world.policy()), *arguments) == 2
    assert words in capsys.readouterr().err
    assert world.api.requests == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(["--selector", "team=b"], "--selector team=b selects none of the 1 policies", id="label"),
        pytest.param(["-n", "web", "-n", "back"], "--namespace web --namespace back selects none", id="namespaces"),
        pytest.param(["-l", "team in a"], "'team in a' is no label's key; write a=b", id="no selector"),
    ],
)
def test_a_selection_that_cannot_be_is_bad_input(
    arguments: list[str], words: str, world: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(world, str(world.policy(labels="{team: a}")), *arguments) == 2
    assert words in capsys.readouterr().err
    assert world.api.requests == []


def test_a_reload_keeps_the_selection(world: Cluster) -> None:
    world.policy(labels="{team: a}")
    world.policy("code", deployment="code", labels="{team: b}")
    with Daemon(world, str(world.folder / "policies"), "--dry-run", "-l", "team=a", "-n", "serving") as daemon:
        assert daemon.until("started")[0]["policies"] == ["chat"]
        daemon.until("decision")
        world.policy(labels="{team: b}")  # its last one goes to another daemon
        (nothing,) = daemon.until("nothing_selected")
        assert nothing["level"] == "warning"
        assert "chat in serving (team=b); code in serving (team=b)" in nothing["detail"]
        assert daemon.until("policies_reloaded")[0]["result"] == "applied"
        world.policy(labels="{team: a}")
        decided = len([line for line in daemon.seen if line["event"] == "decision"])
        assert daemon.until("decision", decided + 1)[-1]["policy"] == "chat"
        assert daemon.end(signal.SIGTERM) == 0
    assert {line["policy"] for line in daemon.seen if "policy" in line} == {"chat"}


def test_c106_without_a_lease_that_can_be_had_it_decides_and_writes_nothing(world: Cluster) -> None:
    world.api.rights = RIGHTS  # none on leases
    policy = world.policy(replicas="{min: 4, max: 8}")
    with Daemon(world, str(policy), "--lease", "serving/autoscaler") as daemon:
        (trouble,) = daemon.until("lease_trouble")
        assert (trouble["lease"], trouble["reason"], trouble["level"]) == ("serving/autoscaler", "forbidden", "warning")
        decisions = daemon.until("decision", 2)
        assert {(one["action"], one["outcome"]) for one in decisions} == {("scale_up", "standby")}
        url = daemon.until("started")[0]["listen"]
        assert get(f"{url}/readyz")[0] == 200
        metrics = get(f"{url}/metrics")[1]
        assert 'autoscaler_leader{lease="serving/autoscaler"} 0.0' in metrics
        assert 'autoscaler_actions_total{direction="up",outcome="standby",policy="chat"}' in metrics
        assert daemon.end(signal.SIGTERM) == 0
    assert not [one for one in world.api.verbs() if one.startswith(("patch deployments", "create events"))]
    assert len([line for line in daemon.seen if line["event"] == "lease_trouble"]) == 1


# --- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "code", "outcome"),
    [
        pytest.param("true", 0, "simulated", id="true"),
        pytest.param("TRUE", 0, "simulated", id="TRUE"),
        pytest.param("1", 0, "simulated", id="1"),
        pytest.param("false", 0, "applied", id="false"),
        pytest.param("0", 0, "applied", id="0"),
        pytest.param("flase", 2, None, id="flase"),
        pytest.param("", 2, None, id="empty"),
        pytest.param("2", 2, None, id="2"),
    ],
)
def test_c130_dry_run_from_the_environment_is_never_live_by_mistake(
    value: str,
    code: int,
    outcome: str | None,
    world: Cluster,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DRY_RUN", value)
    assert invoke(world, str(world.policy(replicas="{min: 4, max: 8}"))) == code
    out, err = capsys.readouterr()
    assert [line["outcome"] for line in events(out, "decision")] == ([] if outcome is None else [outcome])
    if outcome is None:
        assert f"Invalid value for DRY_RUN: {value!r} must be one of true" in err
        assert world.api.requests == []


def test_the_flag_holds_whatever_the_environment_says(
    world: Cluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRY_RUN", "false")
    assert invoke(world, str(world.policy(replicas="{min: 4, max: 8}")), "--dry-run") == 0
    assert events(capsys.readouterr().out, "decision")[0]["outcome"] == "simulated"


def test_a_bad_policy_ends_it_before_anything_is_asked(world: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(world, str(world.policy(replicas="{min: 9, max: 8}"))) == 2
    assert "spec.replicas.min = 9: must not be above replicas.max (8)" in capsys.readouterr().err
    assert world.api.requests == []


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        pytest.param(["--kubeconfig", "/no/such/file"], 1, "no kubeconfig at /no/such/file", id="no kubeconfig"),
        pytest.param(["--context", "elsewhere"], 1, "elsewhere", id="no such context"),
        pytest.param(["--log-level", "loud"], 2, "loud", id="log level"),
        pytest.param(["--log-format", "xml"], 2, "xml", id="log format"),
        pytest.param(["--record", "/no/such/folder/t.gz"], 1, "cannot be written", id="recording"),
    ],
)
def test_bad_arguments_are_said_in_one_line(
    arguments: list[str], code: int, words: str, world: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    known = [] if "--kubeconfig" in arguments else ["--kubeconfig", world.kubeconfig]
    assert run(["run", str(world.policy()), "--once", *known, *arguments]) == code
    err = capsys.readouterr().err
    assert words in err
    assert "Traceback" not in err


@pytest.mark.parametrize("listen", ["nonsense", "127.0.0.1:99999", "taken"])
def test_an_address_that_cannot_be_listened_on_ends_it(
    listen: str, world: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}" if listen == "taken" else listen
        assert run(["run", str(world.policy()), "--kubeconfig", world.kubeconfig, "--listen", address]) == 1
    assert f"listen address {address!r}" in capsys.readouterr().err


def test_c140_a_dead_task_ends_the_process_with_its_error(world: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("bug")

    monkeypatch.setattr(Watchers, "tick", broken)
    with pytest.raises(ExceptionGroup) as raised:
        invoke(world, str(world.policy()), "--dry-run")
    assert [type(error) for error in raised.value.exceptions] == [ZeroDivisionError]


# --- recordings -----------------------------------------------------------------------------------------------------


def test_a_name_that_is_taken_gets_the_time_and_nothing_is_overwritten(
    world: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, policy = tmp_path / "run.trace.gz", str(world.policy())
    assert invoke(world, policy, "--dry-run", "--record", str(trace)) == 0
    first = trace.read_bytes()
    assert events(capsys.readouterr().out, "recording")[0]["file"] == str(trace)
    for _ in range(2):
        assert invoke(world, policy, "--dry-run", "--record", str(trace)) == 0
    files = [line["file"] for line in events(capsys.readouterr().out, "recording")]
    assert trace.read_bytes() == first
    assert sorted(map(str, tmp_path.glob("*.gz"))) == sorted([str(trace), *files])
    for file in files:
        assert run(["replay", file, "--verify"]) == 0


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        pytest.param("run.trace.gz", "run-20250101T000000Z.trace.gz", id="two suffixes"),
        pytest.param("run.gz", "run-20250101T000000Z.gz", id="one suffix"),
        pytest.param("run", "run-20250101T000000Z", id="none"),
    ],
)
def test_the_time_stands_before_the_suffix(name: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("mine")
    recorder, chosen = open_recorder(tmp_path / name, 1_735_689_600.0)
    recorder.close()
    assert chosen == tmp_path / expected
    again, next_one = open_recorder(tmp_path / name, 1_735_689_600.0)
    again.close()
    assert next_one.name == expected.replace("000000Z", "000001Z")


def test_an_empty_file_is_taken_and_one_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    path = tmp_path / "run.trace.gz"
    path.touch()
    recorder, chosen = open_recorder(path, 0.0)
    recorder.close()
    assert chosen == path
    with pytest.raises(TraceError, match="cannot be written"):
        open_recorder(tmp_path / "no" / "run.trace.gz", 0.0)


SERVER = PrometheusServer(url="http://prometheus:9090", headers={"X-Scope-OrgID": "tenant-1", "Cookie": "s3cr3t"})


def test_recorded_policies_hold_no_header_values() -> None:
    policy = replace(
        P0, signals=replace(P0.signals, prometheus={"default": SERVER, "other": replace(SERVER, headers={})})
    )
    plain = recordable(policy)
    assert "tenant-1" not in json.dumps(plain)
    assert "s3cr3t" not in json.dumps(plain)
    back = policy_from_plain(plain)
    assert back.signals.prometheus["default"] == replace(SERVER, headers={"X-Scope-OrgID": "***", "Cookie": "***"})
    assert replace(back, signals=Signals()) == replace(policy, signals=Signals())
    assert recordable(P0) == policy_to_plain(P0)


def test_c144_a_recording_holds_no_header_values(
    world: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "run.trace.gz"
    server = "{url: 'http://127.0.0.1:9', headers: {X-Api-Key: s3cr3t-of-the-test}}"
    more = f"  signals:\n    vllm: {{port: {world.port}}}\n    prometheus: {{default: {server}}}\n"
    assert invoke(world, str(world.policy(more=more)), "--dry-run", "--record", str(trace)) == 0
    assert b"s3cr3t" not in zlib.decompress(trace.read_bytes(), 31)
    assert "s3cr3t" not in capsys.readouterr().out
    assert run(["replay", str(trace), "--verify"]) == 0


def test_a_recording_that_fails_is_said_once_and_the_loop_goes_on(tmp_path: Path) -> None:
    recorder, _ = open_recorder(tmp_path / "run.trace.gz", 0.0)
    recorder.close()
    recorder.failure = "run.trace.gz: recording stopped: No space left on device"
    one = World(P0, 2)
    snapshot, decision = one.snapshot(), one.decide()
    with capture_logs() as lines:
        telemetry = Telemetry(CollectorRegistry(), structlog.get_logger())
        watchers = Watchers(telemetry, Health(ManualClock()), recorder)
        watchers.started(P0)
        for _ in range(3):
            watchers.tick(P0.name, snapshot, decision, Outcome.UNCHANGED, 0.0)
    assert [line["event"] for line in lines] == ["recording_stopped", "decision", "decision", "decision"]
    assert lines[0]["problem"] == recorder.failure


# --- what is said once ----------------------------------------------------------------------------------------------


def test_autoscalers_that_cannot_be_seen_and_how_devices_are_attributed(
    world: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    world.api.rights = RIGHTS - {("autoscaling", "horizontalpodautoscalers", "list")}
    more = f"  signals:\n    vllm: {{port: {world.port}}}\n    dcgm: {{urls: ['{world.dcgm_url}']}}\n"
    assert invoke(world, str(world.policy(more=more)), "--dry-run") == 0
    out = capsys.readouterr().out
    (hidden,) = events(out, "hpas_not_visible")
    assert (hidden["level"], hidden["target"]) == ("warning", "serving/chat")
    (attribution,) = events(out, "attribution")
    assert attribution["source"] == "dcgm"
    assert "2 of 2 GPU series attributed to the target" in attribution["detail"]


def test_with_all_rights_and_no_devices_nothing_of_that_is_said(
    world: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(world, str(world.policy()), "--dry-run") == 0
    out = capsys.readouterr().out
    assert events(out, "hpas_not_visible") == events(out, "attribution") == []


class TalkativeSource(WorldSource):
    """A source that can say how it reads the target."""

    def report(self, target: TargetStatus) -> object:
        """Name the target."""
        return f"devices of {target.name}"


def test_it_is_said_once_a_target_whatever_is_reloaded() -> None:
    target = WorldTarget(World(P0, 2), ManualClock())
    hidden = DeploymentTarget.__new__(DeploymentTarget)
    hidden.hpa_visible = False
    parts = Parts(target=hidden, sources=(WorldSource(target), TalkativeSource(target, name="dcgm")), actuator=target)
    snapshot, decision = target.world.snapshot(), target.world.decide()
    other = replace(snapshot, target=replace(snapshot.target, name="chat-b"))
    with capture_logs() as lines:
        first = FirstTicks(structlog.get_logger())
        first.built(P0, parts)
        for _ in range(3):
            first.tick(P0.name, snapshot, decision, Outcome.UNCHANGED, 0.0)
            first.built(P0, parts)
        first.tick(P0.name, other, decision, Outcome.UNCHANGED, 0.0)
    assert [(line["event"], line["target"]) for line in lines] == [
        ("hpas_not_visible", "serving/chat-a"),
        ("attribution", "serving/chat-a"),
        ("hpas_not_visible", "serving/chat-b"),
        ("attribution", "serving/chat-b"),
    ]
    assert lines[1]["detail"] == "devices of chat-a"


# --- noticing changes -----------------------------------------------------------------------------------------------


@contextmanager
def changing(paths: list[Path]) -> Iterator[None]:
    """Assert that the block changes the fingerprint."""
    before = fingerprint(paths)
    yield
    assert fingerprint(paths) != before


def test_a_fingerprint_changes_with_every_file(tmp_path: Path) -> None:
    folder, file = tmp_path / "policies", tmp_path / "one.yaml"
    folder.mkdir()
    (folder / "a.yaml").write_text("a")
    file.write_text("b")
    paths = [folder, file]
    assert fingerprint(paths) == fingerprint(paths)
    with changing(paths):
        (folder / "a.yaml").write_text("longer")
    with changing(paths):
        os.utime(folder / "a.yaml", (1, 1))
    with changing(paths):
        (folder / "b.yaml").write_text("b")
    with changing(paths):
        (folder / "b.yaml").rename(folder / "c.yaml")
    with changing(paths):
        file.unlink()
    with changing(paths):
        (folder / "a.yaml").unlink()
    hidden = fingerprint(paths)
    (folder / ".a.yaml.swp").write_text("an editor's")
    assert fingerprint(paths) == hidden
    with changing(paths):
        (folder / "c.yaml").unlink()


def test_a_fingerprint_follows_the_swap_of_a_mounted_config_map(tmp_path: Path) -> None:
    for version, text in (("..1", "old"), ("..2", "new")):
        (tmp_path / version).mkdir()
        (tmp_path / version / "chat.yaml").write_text(text)
        os.utime(tmp_path / version / "chat.yaml", (1, int(version[-1])))
    (tmp_path / "..data").symlink_to("..1")
    (tmp_path / "chat.yaml").symlink_to("..data/chat.yaml")
    with changing([tmp_path]):
        (tmp_path / "..next").symlink_to("..2")
        (tmp_path / "..next").rename(tmp_path / "..data")


def test_a_folder_that_cannot_be_listed_is_no_reason_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_path: Path) -> Iterator[Path]:
        raise PermissionError

    monkeypatch.setattr(Path, "iterdir", refuse)
    assert fingerprint([tmp_path]) == ()
