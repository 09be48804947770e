"""Log lines, metrics, floods and secrets, and that the pages in docs/ name all there is."""

import io
import itertools
import json
import logging
import math
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import numpy as np
import pytest
import structlog
from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from structlog.typing import FilteringBoundLogger

from autoscaler import __version__
from autoscaler.core.policy import Evidence, Policy, PrometheusServer, ReplicaBounds, Signals, TargetRef
from autoscaler.core.types import (
    WHOLE_PAGE,
    Action,
    Batching,
    BatchReason,
    Bound,
    Bounds,
    Decision,
    DeletionCost,
    Demand,
    Drain,
    Engines,
    Floats,
    Forecast,
    ForeignChange,
    Gap,
    GapReason,
    Hold,
    Limits,
    Measured,
    Mode,
    Outcome,
    Part,
    PodBatching,
    Proposal,
    Reason,
    RollOut,
    ScaleReplicas,
    Score,
    SetBatching,
    Snapshot,
    Standing,
    Step,
    TargetStatus,
)
from autoscaler.errors import ActuationError, AutoscalerError, Problem, TargetError
from autoscaler.telemetry import Telemetry, configure_logging, redact
from autoscaler.telemetry.metrics import ERROR_KINDS, FAMILIES, MAX_GAP_SERIES, SIGNALS, SOURCES
from autoscaler.telemetry.report import decision_fields

DOCS = Path(__file__).parent.parent / "docs"
TOKEN, PASSWORD = "tok-SECRET", "pw-SECRET"


class Terminal(io.StringIO):
    """A fake terminal: it says that it is one, and has no size."""

    def isatty(self) -> bool:
        return True


class Sink:
    """Everything that one test logged."""

    def __init__(self, stream: io.StringIO) -> None:
        self.stream = stream

    @property
    def text(self) -> str:
        return self.stream.getvalue()

    def events(self, name: str = "") -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.text.splitlines()]
        return [line for line in lines if not name or line["event"] == name]


@pytest.fixture(autouse=True)
def _restored_logging() -> Iterator[None]:
    """Undo what `configure_logging` does to the process."""
    root, hook = logging.getLogger(), sys.excepthook
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    sys.excepthook = hook
    structlog.reset_defaults()


@pytest.fixture
def sink() -> Sink:
    stream = io.StringIO()
    configure_logging("debug", stream=stream)
    return Sink(stream)


class Bench:
    """A telemetry under test, with its registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        logger: FilteringBoundLogger = structlog.get_logger()
        self.telemetry = Telemetry(self.registry, logger)

    def value(self, name: str, policy: str = "chat", **labels: str) -> float | None:
        return self.registry.get_sample_value(f"autoscaler_{name}", {"policy": policy, **labels})

    def series(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        """Return every exported series, as a Prometheus server would read it."""
        text = generate_latest(self.registry).decode()
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def total(self, name: str) -> float:
        return sum(value for (series, _), value in self.series().items() if series == f"autoscaler_{name}")


@pytest.fixture
def bench(sink: Sink) -> Bench:
    assert sink.text == ""
    return Bench()


def a_policy(name: str = "chat", **fields: Any) -> Policy:
    return Policy(name=name, target=TargetRef(deployment=name), replicas=ReplicaBounds(min=2, max=8), **fields)


def a_snapshot(at: float = 1000.0, gaps: tuple[Gap, ...] = (), current: int = 4, name: str = "chat") -> Snapshot:
    empty: Floats = np.empty((0, 0), dtype=np.float64)
    target = TargetStatus(namespace="serving", name=name, current_replicas=current, ready_replicas=3)
    return Snapshot(at=at, target=target, engines=Engines(keys=(), values=empty), gaps=gaps)


SCORE = Score(
    value=0.8123456,
    shrink_value=None,
    known_weight=0.75,
    parts=(
        Part(name="memory", weight=0.40, value=0.9, shrink_value=0.95, driver="kv_cache_usage 0.81"),
        Part(name="backlog", weight=0.35, value=0.7, shrink_value=0.7, driver="waiting 14.0"),
        Part(name="latency", weight=0.25, value=None, shrink_value=None, gap=GapReason.NO_OBSERVATIONS),
    ),
    binds="memory",
    memory_guard=0.25,
)
NO_SCORE = replace(SCORE, value=None)


def a_decision(
    at: float = 1000.0,
    *,
    score: Score | None = SCORE,
    action: Action | None = None,
    reason: Reason = Reason.UP_DEMAND,
    demand: Demand | None = None,
) -> Decision:
    return Decision(
        at=at,
        score=score,
        demand=demand or Demand(itl=5.25, kv=3.0, sequences=1.0),
        forecast=Forecast(horizon_s=185.0, level=5.25, top=6.5, sigma=0.5, up=8, keep=5),
        proposal=Proposal(
            current=4,
            replicas=6,
            reason=reason,
            steps=(Step(rule=Reason.LIMITED_STEP, before=8, after=6, detail="at most +2"),),
            wished=8,
        ),
        reason=reason,
        mode=Mode.QPS_SPIKE,
        action=action or ScaleReplicas(seen=4, to=6),
        unblocks=("down: score 0.81 must stay below 0.40 for 300 s",),
    )


def a_gap(reason: GapReason = GapReason.TIMEOUT, pod: str = "chat-1", detail: str = "", **fields: str) -> Gap:
    return Gap(**{"signal": WHOLE_PAGE, "source": "vllm", **fields}, reason=reason, pod=pod, detail=detail)


def run_tick(bench: Bench, at: float = 1000.0, gaps: tuple[Gap, ...] = (), score: Score | None = SCORE) -> None:
    decision = a_decision(at, score=score, action=Hold(), reason=Reason.STEADY)
    bench.telemetry.tick("chat", a_snapshot(at, gaps), decision, Outcome.UNCHANGED, 0.2)


# --- the decision line ----------------------------------------------------------------------------------------------


def test_decision_line_explains_itself(bench: Bench, sink: Sink) -> None:
    bench.telemetry.loaded(a_policy(), dry_run=True)
    gaps = (a_gap(detail="no page within 3 s"), a_gap(pod="chat-2"), a_gap(GapReason.DCGM_BLANK, source="dcgm"))
    bench.telemetry.tick("chat", a_snapshot(1000.5, gaps), a_decision(1000.5), Outcome.SIMULATED, 0.1234567)
    (line,) = sink.events("decision")
    assert list(line)[:3] == ["timestamp", "level", "event"]
    del line["timestamp"]
    assert line == {
        "event": "decision",
        "level": "info",
        "policy": "chat",
        "target": "serving/chat",
        "at": 1000.5,
        "score": {
            "value": 0.8123,
            "shrink_value": None,
            "known_weight": 0.75,
            "binds": "memory",
            "parts": {
                "memory": {"value": 0.9, "shrink_value": 0.95, "weight": 0.4, "driver": "kv_cache_usage 0.81"},
                "backlog": {"value": 0.7, "shrink_value": 0.7, "weight": 0.35, "driver": "waiting 14.0"},
                "latency": {"value": None, "shrink_value": None, "weight": 0.25, "gap": "no_observations"},
            },
            "memory_guard": 0.25,
        },
        "demand": {"value": 5.25, "itl": 5.25, "kv": 3.0, "sequences": 1.0, "binds": "itl"},
        "forecast": {"horizon_s": 185.0, "level": 5.25, "top": 6.5, "sigma": 0.5, "up": 8, "keep": 5},
        "current_replicas": 4,
        "ready_replicas": 3,
        "desired_replicas": 6,
        "action": "scale_up",
        "reason": "up_demand",
        "mode": "qps_spike",
        "steps": ["limited_step 8->6: at most +2"],
        "gaps": {
            "timeout": {"count": 2, "first": "vllm * chat-1: no page within 3 s"},
            "dcgm_blank": {"count": 1, "first": "dcgm * chat-1"},
        },
        "unblocks": ["down: score 0.81 must stay below 0.40 for 300 s"],
        "outcome": "simulated",
        "duration_s": 0.1235,
        "dry_run": True,
    }


@pytest.mark.parametrize(
    ("decision", "field", "expected"),
    [
        pytest.param(a_decision(score=None), "score", None, id="no-score"),
        pytest.param(
            a_decision(demand=Demand(gap=GapReason.NO_HISTORY)),
            "demand",
            {"value": None, "gap": "no_history"},
            id="no-demand",
        ),
        pytest.param(a_decision(action=Hold()), "desired_replicas", 4, id="hold-wants-what-is"),
        pytest.param(a_decision(action=ScaleReplicas(seen=4, to=3)), "action", "scale_down", id="down"),
        pytest.param(
            replace(a_decision(), forecast=Forecast(horizon_s=math.nan, gap=GapReason.NO_CAPACITY)),
            "forecast",
            {"horizon_s": None, "gap": "no_kv_capacity"},
            id="nan-is-unknown",
        ),
    ],
)
def test_decision_fields_of_what_is_unknown(decision: Decision, field: str, expected: object) -> None:
    assert decision_fields(a_snapshot(), decision, Outcome.UNCHANGED, 0.1)[field] == expected


@pytest.mark.parametrize("reason", list(Reason))
def test_a_tick_is_reported_whatever_the_reason(bench: Bench, sink: Sink, reason: Reason) -> None:
    nothing = replace(a_decision(score=None, reason=reason, demand=Demand()), forecast=Forecast(horizon_s=math.inf))
    bench.telemetry.tick("chat", a_snapshot(), nothing, Outcome.FAILED, math.inf)
    assert [line["reason"] for line in sink.events("decision")] == [str(reason)]
    assert bench.value("decisions_total", reason=str(reason)) == 1.0


STANDING = Standing(up=True, to=6, made_at=1_764_500_000.0, expires_at=1_764_500_600.0, wished_at=1_764_500_000.0)


@pytest.mark.parametrize(
    ("action", "state", "gauge"),
    [
        pytest.param(Hold(), "waits", 6.0, id="waits"),
        pytest.param(ScaleReplicas(seen=4, to=6), "approved", None, id="approved"),
    ],
)
def test_a_proposal_is_in_the_line_and_in_a_gauge(
    bench: Bench, sink: Sink, action: Action, state: str, gauge: float | None
) -> None:
    decision = a_decision(action=action)
    proposed = replace(decision, proposal=replace(decision.proposal, standing=STANDING))
    bench.telemetry.tick("chat", a_snapshot(), proposed, Outcome.UNCHANGED, 0.1)
    (line,) = sink.events("decision")
    assert line["approval"] == {
        "id": "up-to-6-t6jcww",
        "state": state,
        "replicas": 6,
        "expires_at": STANDING.expires_at,
    }
    assert bench.value("proposed_replicas") == gauge
    bench.telemetry.tick("chat", a_snapshot(), decision, Outcome.UNCHANGED, 0.1)
    assert bench.value("proposed_replicas") is None


def test_the_bounds_that_a_schedule_moves_are_in_the_line_and_in_the_gauges(bench: Bench, sink: Sink) -> None:
    bench.telemetry.loaded(a_policy())
    moved = replace(a_decision(), bounds=Bounds(min=4, max=6, by=("day",)))
    bench.telemetry.tick("chat", a_snapshot(), moved, Outcome.UNCHANGED, 0.1)
    assert sink.events("decision")[0]["bounds"] == "min 4, max 6 by schedule day"
    assert (bench.value("min_replicas"), bench.value("max_replicas")) == (4.0, 6.0)
    bench.telemetry.tick("chat", a_snapshot(), a_decision(), Outcome.UNCHANGED, 0.1)
    assert (bench.value("min_replicas"), bench.value("max_replicas")) == (2.0, 8.0)


def test_console_line_of_a_proposal_between_moved_bounds() -> None:
    terminal = Terminal()
    configure_logging("info", stream=terminal)
    decision = replace(a_decision(action=Hold()), bounds=Bounds(min=4, max=6, by=("day",)))
    proposed = replace(decision, proposal=replace(decision.proposal, standing=STANDING))
    Bench().telemetry.tick("chat", a_snapshot(), proposed, Outcome.UNCHANGED, 0.1)
    assert "  min 4, max 6 by schedule day  proposal up-to-6-t6jcww waits  steps " in terminal.getvalue()


def test_console_line_is_short() -> None:
    terminal = Terminal()
    configure_logging("info", stream=terminal)
    bench = Bench()
    bench.telemetry.loaded(a_policy(dry_run=True))
    bench.telemetry.tick("chat", a_snapshot(gaps=(a_gap(),)), a_decision(), Outcome.SIMULATED, 0.1)
    line = terminal.getvalue().splitlines()[-1]
    assert "\x1b[" in line
    plain = re.sub(r"\x1b\[[0-9;]*m", "", line)
    assert plain.endswith(
        "chat: 4 -> 6  scale_up up_demand (simulated)  ready 3/4  score 0.81 memory  demand 5.25 itl  "
        "forecast 6.50 in 185s  mode qps_spike  steps limited_step 8->6: at most +2  gaps timeout x1  "
        "next down: score 0.81 must stay below 0.40 for 300 s  dry-run"
    )


def test_console_line_of_a_hold_without_evidence() -> None:
    terminal = Terminal()
    configure_logging("info", stream=terminal)
    unknown = replace(
        a_decision(score=None, action=Hold(), reason=Reason.NO_DATA, demand=Demand(gap=GapReason.NO_HISTORY)),
        forecast=Forecast(horizon_s=180.0),
        mode=Mode.NORMAL,
        unblocks=(),
        proposal=Proposal(current=4, replicas=4, reason=Reason.NO_DATA),
    )
    Bench().telemetry.tick("chat", a_snapshot(), unknown, Outcome.UNCHANGED, 0.1)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue()).rstrip("\n")
    assert plain.endswith("chat: 4  hold no_data  ready 3/4  score unknown  demand unknown no_history")


@pytest.mark.parametrize(
    ("stream", "forced", "is_json"),
    [
        pytest.param(io.StringIO(), None, True, id="pipe"),
        pytest.param(Terminal(), None, False, id="terminal"),
        pytest.param(Terminal(), True, True, id="json-on-a-terminal"),
        pytest.param(io.StringIO(), False, False, id="console-on-a-pipe"),
    ],
)
def test_format_follows_the_stream(stream: io.StringIO, forced: bool | None, is_json: bool) -> None:
    configure_logging("info", json=forced, stream=stream)
    structlog.get_logger().info("hello", answer=42)
    logging.getLogger("library").warning("careful: %s", "thin ice")
    ours, theirs = stream.getvalue().splitlines()
    assert ours.startswith("{") == is_json
    assert theirs.startswith("{") == is_json
    if is_json:
        assert json.loads(theirs)["event"] == "careful: thin ice"
        assert json.loads(theirs)["logger"] == "library"
    else:
        assert ("\x1b[" in ours) == stream.isatty()


def test_console_without_colors_where_they_are_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    terminal = Terminal()
    configure_logging("info", stream=terminal)
    structlog.get_logger().info("hello")
    assert "\x1b[" not in terminal.getvalue()
    assert "hello" in terminal.getvalue()


@pytest.mark.parametrize(
    ("level", "heard"),
    [
        pytest.param("debug", ["ours-debug", "ours-info", "theirs-debug", "theirs-info"], id="debug"),
        pytest.param("info", ["ours-info"], id="info-without-libraries"),
        pytest.param("ERROR", [], id="error"),
    ],
)
def test_level(level: str, heard: list[str]) -> None:
    stream = io.StringIO()
    configure_logging(level, stream=stream)
    structlog.get_logger().debug("ours-debug")
    structlog.get_logger().info("ours-info")
    logging.getLogger("library").debug("theirs-debug")
    logging.getLogger("library").info("theirs-info")
    assert [line["event"] for line in Sink(stream).events()] == heard


def test_unknown_level() -> None:
    with pytest.raises(AutoscalerError, match="log level 'loud': must be debug, info, warning, error or critical"):
        configure_logging("loud")


def test_set_up_twice_logs_once() -> None:
    first, second = io.StringIO(), io.StringIO()
    configure_logging("info", stream=first)
    configure_logging("info", stream=second)
    logging.getLogger("library").warning("careful")
    assert first.getvalue() == ""
    assert len(second.getvalue().splitlines()) == 1


def test_values_without_a_json_form(sink: Sink) -> None:
    structlog.get_logger().info("odd", nan=math.nan, kind=Reason.STEADY, where=Path("a"), many={"b"}, none=None)
    (line,) = sink.events("odd")
    assert (line["nan"], line["kind"], line["none"], line["many"]) == (None, "steady", None, ["b"])
    assert "Path" in line["where"]


def test_c111_a_template_that_cuts_requests_is_said_once_with_its_numbers(bench: Bench, sink: Sink) -> None:
    policy = a_policy()
    bench.telemetry.loaded(replace(policy, scale_down=replace(policy.scale_down, drain_s=300.0)))
    short, good = Drain(grace_s=30.0), Drain(grace_s=330.0, pre_stop_s=15.0, drain_s=300.0)
    seen = []
    for at, drain in ((0.0, None), (5.0, short), (10.0, short), (15.0, good), (20.0, replace(short, grace_s=60.0))):
        snapshot = a_snapshot(at)
        snapshot = replace(snapshot, target=replace(snapshot.target, drain=drain))
        decision = a_decision(at, action=Hold(), reason=Reason.STEADY)
        bench.telemetry.tick("chat", snapshot, decision, Outcome.UNCHANGED, 0.2)
        seen.append(bench.value("unsafe_drain"))
    assert seen == [None, 1.0, 1.0, 0.0, 1.0]
    first, second = (line["detail"] for line in sink.events("unsafe_drain"))
    assert first.startswith("terminationGracePeriodSeconds 30 < preStop 0 + drain 300")
    assert second.startswith("terminationGracePeriodSeconds 60 <")


def test_pods_that_are_refused_are_said_once_whatever_is_decided(bench: Bench, sink: Sink) -> None:
    bench.telemetry.loaded(a_policy())
    for at, refused in ((0.0, ""), (5.0, "exceeded quota: a"), (10.0, "exceeded quota: a"), (15.0, "denied")):
        snapshot = a_snapshot(at)
        snapshot = replace(snapshot, target=replace(snapshot.target, refused=refused))
        decision = a_decision(at, action=Hold(), reason=Reason.STEADY)
        bench.telemetry.tick("chat", snapshot, decision, Outcome.UNCHANGED, 0.2)
    assert [line["detail"] for line in sink.events("pods_refused")] == ["exceeded quota: a", "denied"]


def test_without_a_wish_for_time_to_drain_nothing_is_said_of_it(bench: Bench, sink: Sink) -> None:
    bench.telemetry.loaded(a_policy())
    snapshot = a_snapshot()
    snapshot = replace(snapshot, target=replace(snapshot.target, drain=Drain(grace_s=0.0)))
    bench.telemetry.tick("chat", snapshot, a_decision(), Outcome.APPLIED, 0.2)
    assert bench.value("unsafe_drain") is None
    assert not sink.events("unsafe_drain")


def test_c109_each_change_by_somebody_else_is_counted_and_said(bench: Bench, sink: Sink) -> None:
    bench.telemetry.loaded(a_policy())
    undid = ForeignChange(at=0.0, before=5, after=2, by="argocd-controller", undid=True)
    edited = ForeignChange(at=5.0, before=2, after=3, by="kubectl-edit", written_at=4.0)
    for at, change in ((0.0, undid), (5.0, edited), (10.0, None)):
        decision = replace(a_decision(at, action=Hold(), reason=Reason.HELD_COOLDOWN), change=change)
        bench.telemetry.tick("chat", a_snapshot(at), decision, Outcome.UNCHANGED, 0.2)
    assert bench.value("foreign_changes_total", effect="undid") == 1.0
    assert bench.value("foreign_changes_total", effect="changed") == 1.0
    first, second = sink.events("replicas_changed")
    assert (first["level"], second["level"]) == ("warning", "info")
    assert (first["by"], first["before"], first["after"], first["undid"]) == ("argocd-controller", 5, 2, True)
    assert "written_at" not in first
    assert (second["by"], second["written_at"]) == ("kubectl-edit", 4.0)


# --- secrets --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(f"GET https://user:{PASSWORD}@prom:9090/api/v1/query failed", id="url-password"),
        pytest.param(f"https://{TOKEN}@prom:9090", id="url-user-only"),
        pytest.param(f"https://user:a/b?c#{PASSWORD}@prom", id="url-password-unescaped"),
        pytest.param(f"https://user:p@{PASSWORD}@prom", id="url-password-with-at"),
        pytest.param(f"Authorization: Bearer {TOKEN}", id="header"),
        pytest.param(f"authorization={TOKEN}", id="keyword"),
        pytest.param(f"AUTHORIZATION:Bearer {TOKEN}", id="header-tight"),
        pytest.param(f"Proxy-Authorization: Basic {TOKEN}", id="proxy-header"),
        pytest.param(f"Authorization: Digest username=u, response={TOKEN}", id="digest"),
        pytest.param(f"{{'Authorization': 'Bearer {TOKEN}', 'X-Scope-OrgID': 'a'}}", id="headers-repr"),
        pytest.param(f"[(b'authorization', b'Bearer {TOKEN}')]", id="raw-headers-repr"),
        pytest.param(f"Illegal header value b'Bearer {TOKEN}\\n'", id="illegal-header-value"),
        pytest.param(f"X-Api-Key: {TOKEN}", id="api-key"),
        pytest.param(f"Cookie: a=1; session={TOKEN}; b=2", id="cookie"),
        pytest.param(f'{{"token": "{TOKEN}"}}', id="json"),
        pytest.param(f'{{\\"token\\":\\"{TOKEN}\\"}}', id="json-in-json"),
        pytest.param(f"password: {PASSWORD}", id="yaml"),
        pytest.param(f"client_secret={TOKEN}&x=1", id="form"),
        pytest.param(f"/query?access_token={TOKEN}&query=up", id="query-string"),
        pytest.param(f"headers={{'Authorization': 'Bearer {TOKEN}", id="cut-off"),
        pytest.param("Basic dXNlcjpwdy1TRUNSRVQ=", id="basic"),
        pytest.param("token eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJhIn0.c2ln is expired", id="jwt"),
    ],
)
def test_redacts(text: str) -> None:
    shown = redact(text)
    assert "***" in shown
    for secret in (TOKEN, PASSWORD, "dXNlcjpwdy1TRUNSRVQ", "eyJ"):
        assert secret not in shown


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("http://10.0.0.1:8000/metrics: HTTP 503", id="url"),
        pytest.param("prompt_tokens=5 max_num_batched_tokens: 8192 kv_capacity_tokens 9e5", id="token-counts"),
        pytest.param("bearer_token_file='/var/run/token' password_file: /etc/pw", id="files"),
        pytest.param("the bearer token is missing; basic auth needs both", id="prose"),
        pytest.param("authorization failed: 403 Forbidden", id="refused"),
        pytest.param('sum(rate(vllm:prompt_tokens_total{pod=~"chat-.*"}[1m] @ 1000))', id="promql"),
        pytest.param("X-Scope-OrgID: team-a", id="tenant"),
    ],
)
def test_leaves_alone(text: str) -> None:
    assert redact(text) == text


def test_redaction_keeps_what_helps() -> None:
    text = f"GET https://user:{PASSWORD}@prom:9090/api with {{'Authorization': 'Bearer {TOKEN}', 'X-Scope-OrgID': 'a'}}"
    assert redact(text) == "GET https://***@prom:9090/api with {'Authorization': ***, 'X-Scope-OrgID': 'a'}"


async def _refuse(request: web.Request) -> web.Response:
    """Answer like a server that repeats its caller's credentials in the body of a 401."""
    return web.Response(status=401, text=f"denied: {dict(request.headers)}")


async def test_c144_credentials_in_logs(bench: Bench, sink: Sink) -> None:
    """A 401, a TLS error and a dump of the policy, at level debug, through two HTTP clients that log by themselves."""
    log = structlog.get_logger()
    application = web.Application()
    application.router.add_get("/api", _refuse)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]
    headers = {"Authorization": f"Bearer {TOKEN}"}
    url = f"http://user:{PASSWORD}@127.0.0.1:{port}/api"
    tls_url = url.replace("http://", "https://")
    failures: list[BaseException] = []
    async with aiohttp.ClientSession() as session, httpx.AsyncClient() as client:
        for address in (url, tls_url):
            for hidden in (headers, None):
                try:
                    async with session.get(address, headers=hidden) as response:
                        log.debug("answer", status=response.status, body=await response.text(), url=response.url)
                        response.raise_for_status()
                except (aiohttp.ClientError, ValueError) as error:
                    failures.append(error)
            try:
                answer = await client.get(address, headers=headers)
                log.debug("answer", request=answer.request, headers=list(answer.request.headers.raw), text=answer.text)
                answer.raise_for_status()
            except httpx.HTTPError as error:
                failures.append(error)
    await runner.cleanup()
    assert len(failures) == 6
    server = PrometheusServer(url=tls_url, headers=headers, bearer_token_file="/var/run/token")
    policy = a_policy(signals=Signals(prometheus={"default": server}))
    log.info("policy", policy=policy, headers=headers, pairs=list(headers.items()), token=TOKEN)
    for failure in failures:
        try:
            raise TargetError("unauthorized", f"{failure!r} with {headers} for {url}") from failure
        except TargetError as chained:
            log.exception("failed")
            bench.telemetry.error("chat", "target", chained)
            bench.telemetry.error("chat", "bug", RuntimeError(f"{url}: {chained}"))
            logging.getLogger("library").warning("%s %s", url, headers, exc_info=chained)
            sys.excepthook(type(chained), chained, chained.__traceback__)
    bench.telemetry.reload(
        "rejected", [Problem("p.yaml", "spec.signals.prometheus.default.url", url, "no secrets here")]
    )
    run_tick(bench, gaps=(a_gap(GapReason.UNAUTHORIZED, detail=f"{url} {headers}", source="prometheus"),))
    page = generate_latest(bench.registry).decode()
    assert {"httpx", "library"} <= {line.get("logger", "") for line in sink.events()}
    assert len(sink.events("crashed")) == 6
    assert "Authorization" in sink.text
    assert "127.0.0.1" in sink.text
    for secret in (TOKEN, PASSWORD):
        assert secret not in sink.text
        assert secret not in page


def test_crash_is_logged(sink: Sink) -> None:
    try:
        raise ZeroDivisionError(f"Bearer {TOKEN}")
    except ZeroDivisionError as error:
        sys.excepthook(type(error), error, error.__traceback__)
    (line,) = sink.events("crashed")
    assert line["level"] == "critical"
    assert "Traceback" in line["exception"]
    assert "ZeroDivisionError: Bearer ***" in line["exception"]


def test_ctrl_c_is_no_crash(sink: Sink, capsys: pytest.CaptureFixture[str]) -> None:
    sys.excepthook(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert sink.text == ""
    assert "KeyboardInterrupt" in capsys.readouterr().err


# --- metrics --------------------------------------------------------------------------------------------------------


def test_metrics_of_a_tick(bench: Bench) -> None:
    bench.telemetry.loaded(a_policy())
    bench.telemetry.tick("chat", a_snapshot(1000.5, (a_gap(), a_gap())), a_decision(), Outcome.APPLIED, 0.3)
    expected = {
        "score": 0.8123456,
        "score_shrink": None,
        "score_known_weight": 0.75,
        "memory_guard": 0.25,
        "forecast_level_replicas": 5.25,
        "forecast_top_replicas": 6.5,
        "forecast_sigma_replicas": 0.5,
        "forecast_up_replicas": 8.0,
        "forecast_keep_replicas": 5.0,
        "forecast_score": None,
        "forecast_horizon_seconds": 185.0,
        "current_replicas": 4.0,
        "ready_replicas": 3.0,
        "desired_replicas": 6.0,
        "min_replicas": 2.0,
        "max_replicas": 8.0,
        "dry_run": 0.0,
        "no_data": 0.0,
        "last_tick_timestamp_seconds": 1000.5,
        "ticks_total": 1.0,
        "tick_overruns_total": 0.0,
        "tick_duration_seconds_sum": 0.3,
        "tick_duration_seconds_count": 1.0,
    }
    assert {name: bench.value(name) for name in expected} == expected
    assert bench.value("score_part", part="memory") == 0.9
    assert bench.value("score_part", part="latency") is None
    assert bench.value("demand_replicas", term="kv") == 3.0
    assert bench.value("decisions_total", reason="up_demand") == 1.0
    assert bench.value("actions_total", direction="up", outcome="applied") == 1.0
    assert bench.value("gaps_total", source="vllm", signal="*", reason="timeout") == 2.0
    assert bench.value("gaps_total", source="core", signal="latency", reason="no_observations") == 1.0
    assert bench.registry.get_sample_value("autoscaler_build_info", {"version": __version__}) == 1.0


def tuned() -> Decision:
    """Return a decision that sets batching limits."""
    limits = Limits(max_num_seqs=64, max_num_batched_tokens=2048, long_prefill_token_threshold=0)
    wanted = replace(limits, max_num_seqs=20)
    batching = Batching(
        bound=Bound.KV,
        reason=BatchReason.LOWER_PREEMPTIONS,
        limits=limits,
        wanted=wanted,
        pods=(PodBatching(pod="chat-1", uid="u-1", limits=wanted),),
        measured=Measured(
            seconds=30.0, running=30.0, waiting=5.0, peak=32.0, preemptions=44.0, finished=60.0, tokens_per_s=1000.0
        ),
        detail="44 preemptions, KV cache at 0.97",
        left_alone=(("chat-2", "another scheduler"),),
    )
    action = SetBatching(limits=wanted, pods=batching.pods)
    return replace(a_decision(action=action, reason=Reason.STEADY), batching=batching)


def test_batching_limits_are_in_the_line_and_in_the_metrics(bench: Bench, sink: Sink) -> None:
    bench.telemetry.tick("chat", a_snapshot(), tuned(), Outcome.APPLIED, 0.2)
    (line,) = sink.events("decision")
    assert line["action"] == "set_batching"
    assert line["desired_replicas"] == 4
    assert line["batching"] == {
        "bound": "kv_bound",
        "reason": "lower_preemptions",
        "limits": "seqs 64, tokens 2048, long prefill 0",
        "wanted": "seqs 20, tokens 2048, long prefill 0",
        "pods": 1,
        "detail": "44 preemptions, KV cache at 0.97",
        "left_alone": ["chat-2: another scheduler"],
        "seconds": 30.0,
        "running": 30.0,
        "waiting": 5.0,
        "peak": 32.0,
        "preemptions": 44.0,
        "finished": 60.0,
        "tokens_per_s": 1000.0,
    }
    assert bench.value("batching_limit", limit="max_num_seqs") == 64.0
    assert bench.value("batching_left_alone_pods") == 1.0
    assert bench.value("batching_decisions_total", reason="lower_preemptions") == 1.0
    assert bench.value("actions_total", direction="batching", outcome="applied") == 1.0
    bench.telemetry.tick("chat", a_snapshot(1005.0), a_decision(1005.0), Outcome.APPLIED, 0.2)
    assert bench.value("batching_limit", limit="max_num_seqs") is None
    assert bench.value("batching_left_alone_pods") is None
    assert "batching" not in sink.events("decision")[-1]


@pytest.mark.parametrize(
    ("limits", "back", "result"),
    [
        pytest.param(96, False, "begun", id="begun"),
        pytest.param(96, True, "rolled_back", id="taken back"),
        pytest.param(64, False, "kept", id="kept"),
    ],
)
def test_rollouts_are_in_the_line_and_in_the_metrics(
    bench: Bench, sink: Sink, limits: int, back: bool, result: str
) -> None:
    seen, wanted = Limits(max_num_seqs=64), Limits(max_num_seqs=limits)
    action = RollOut(uid="u", container="vllm", seen=seen, limits=wanted, note="{}", back=back)
    batching = Batching(
        bound=Bound.SEQUENCES, reason=BatchReason.RAISE_SEQUENCES, limits=seen, roll_out=action, applied=False
    )
    decision = replace(a_decision(action=action, reason=Reason.STEADY), batching=batching)
    bench.telemetry.tick("chat", a_snapshot(), decision, Outcome.APPLIED, 0.2)
    bench.telemetry.tick("chat", a_snapshot(1005.0), decision, Outcome.FAILED, 0.2)
    line = sink.events("decision")[0]
    assert (line["action"], line["desired_replicas"], line["batching"]["applied"]) == ("roll_out", 4, False)
    assert "verified" not in line["batching"]
    assert bench.value("batching_rollouts_total", result=result) == 1.0
    assert bench.value("batching_applied") == 0.0
    assert bench.value("actions_total", direction="rollout", outcome="applied") == 1.0


def test_duration_buckets_are_cumulative(bench: Bench) -> None:
    for seconds in (0.01, 0.05, 0.06, 99.0):
        bench.telemetry.tick("chat", a_snapshot(), a_decision(), Outcome.APPLIED, seconds)
    buckets = {
        dict(labels)["le"]: value
        for (name, labels), value in bench.series().items()
        if name.endswith("_seconds_bucket")
    }
    assert (buckets["0.05"], buckets["0.1"], buckets["30"], buckets["+Inf"]) == (2.0, 3.0, 3.0, 4.0)


@pytest.mark.parametrize(
    "later",
    [
        pytest.param(a_decision(score=None, demand=Demand()), id="none"),
        pytest.param(
            a_decision(score=replace(SCORE, value=math.nan), demand=Demand(itl=math.nan, kv=math.nan)), id="nan"
        ),
    ],
)
def test_unknown_removes_the_series(bench: Bench, later: Decision) -> None:
    bench.telemetry.tick("chat", a_snapshot(), a_decision(), Outcome.APPLIED, 0.1)
    assert bench.value("score") is not None
    assert bench.value("demand_replicas", term="itl") is not None
    bench.telemetry.tick("chat", a_snapshot(), later, Outcome.UNCHANGED, 0.1)
    assert bench.value("score") is None
    assert bench.value("demand_replicas", term="itl") is None
    assert "nan" not in generate_latest(bench.registry).decode().lower()


@pytest.mark.parametrize(
    ("kind", "error", "label", "shown"),
    [
        pytest.param("target", TargetError("target_not_found"), "target_not_found", False, id="target-unread"),
        pytest.param("target", TargetError("odd"), "target", False, id="target-of-an-unknown-reason"),
        pytest.param("bug", KeyError("x"), "bug", False, id="bug"),
        pytest.param("actuation", ActuationError("conflict"), "conflict", True, id="write-refused"),
        pytest.param("actuation", TargetError("unreachable"), "unreachable", True, id="reread-after-conflict"),
        pytest.param("http://10.0.0.1 failed", AutoscalerError("x"), "other", False, id="made-up-kind"),
    ],
)
def test_a_failed_tick_shows_no_old_values(bench: Bench, kind: str, error: Exception, label: str, shown: bool) -> None:
    bench.telemetry.loaded(a_policy())
    run_tick(bench)
    bench.telemetry.error("chat", kind, error)
    assert bench.value("tick_errors_total", kind=label) == 1.0
    assert (bench.value("score") is not None) == shown
    assert (bench.value("current_replicas") is not None) == shown
    assert bench.value("max_replicas") == 8.0
    assert bench.value("ticks_total") == 1.0


def test_c104_a_forbidden_write_shows_until_one_succeeds(bench: Bench, sink: Sink) -> None:
    bench.telemetry.loaded(a_policy())
    assert bench.value("write_forbidden") == 0.0
    bench.telemetry.right_missing("chat", "patch deployments/scale in namespace serving")
    assert [line["event"] for line in sink.events()] == ["right_missing"]
    assert bench.value("write_forbidden") == 1.0
    bench.telemetry.loaded(a_policy())
    run_tick(bench)
    bench.telemetry.error("chat", "target", TargetError("unreachable"))
    assert bench.value("write_forbidden") == 1.0
    bench.telemetry.tick("chat", a_snapshot(), a_decision(), Outcome.APPLIED, 0.0)
    assert bench.value("write_forbidden") == 0.0
    for reason, value in (("conflict", 0.0), ("forbidden", 1.0)):
        bench.telemetry.error("chat", "actuation", ActuationError(reason))
        assert bench.value("write_forbidden") == value


def test_c146_one_reason_and_one_outcome_a_tick(bench: Bench, sink: Sink) -> None:
    ticks: list[tuple[Reason, Action, Outcome]] = [
        (Reason.INSUFFICIENT_COMPONENTS, Hold(), Outcome.UNCHANGED),
        (Reason.UP_DEMAND, ScaleReplicas(seen=4, to=6), Outcome.APPLIED),
        (Reason.UP_DEMAND, ScaleReplicas(seen=4, to=6), Outcome.FAILED),
        (Reason.DOWN_SCORE, ScaleReplicas(seen=4, to=3), Outcome.UNCHANGED),
    ]
    for reason, action, outcome in ticks:
        bench.telemetry.tick("chat", a_snapshot(), a_decision(action=action, reason=reason), outcome, 0.1)
    assert [line["reason"] for line in sink.events("decision")] == [str(reason) for reason, _, _ in ticks]
    assert [line["outcome"] for line in sink.events("decision")] == [str(outcome) for _, _, outcome in ticks]
    assert bench.value("decisions_total", reason="insufficient_components") == 1.0
    assert bench.value("actions_total", direction="up", outcome="failed") == 1.0
    assert bench.total("decisions_total") == bench.total("actions_total") == bench.total("ticks_total") == len(ticks)


def test_c154_label_explosion(bench: Bench, sink: Sink) -> None:
    """Five policies, a day in which each loses and gains 100 pods, 300 error texts, every reason for a gap."""
    names = [f"chat-{letter}" for letter in "abcde"]
    for name in names:
        bench.telemetry.loaded(a_policy(name))
    reasons = itertools.cycle(list(Reason)[:20])
    gap_reasons = itertools.cycle(GapReason)
    signals = itertools.cycle(sorted(SIGNALS))
    for step in range(300):
        at = 1000.0 + 288.0 * step
        for name in names:
            pod = f"{name}-{step // 3:04d}-x7k2p"
            text = f"http://10.0.{step % 200}.7:8000/metrics: failure {chr(97 + step % 26)}{step} of {pod}"
            gaps = tuple(
                a_gap(next(gap_reasons), pod=pod, detail=text, source=source, signal=next(signals))
                for source in ("vllm", "dcgm", "prometheus")
            )
            bench.telemetry.learned(name, 0.015, 6e-5, 2e-5, 4e-8, step, 180.0)
            bench.telemetry.overrun(name)
            bench.telemetry.error(
                name, "target" if step % 2 else text, TargetError("unreachable" if step % 3 else text, text)
            )
            decision = a_decision(at, reason=next(reasons))
            bench.telemetry.tick(name, a_snapshot(at, gaps, name=name), decision, Outcome.APPLIED, step / 50.0)
    bench.telemetry.reload("rejected", ["a problem"])
    page = generate_latest(bench.registry).decode()
    assert "failure" in sink.text
    assert len(bench.series()) < 500
    for leaked in ("x7k2p", "failure", "http:", "10.0."):
        assert leaked not in page


def test_gap_series_have_a_hard_bound(bench: Bench) -> None:
    combinations = itertools.product((*sorted(SOURCES), "made-up"), (*sorted(SIGNALS), "made-up"), GapReason)
    gaps = tuple(a_gap(reason, source=source, signal=signal) for source, signal, reason in combinations)
    run_tick(bench, gaps=gaps)
    run_tick(bench, gaps=gaps[:1])
    exported = [labels for name, labels in bench.series() if name == "autoscaler_gaps_total"]
    assert len(exported) == MAX_GAP_SERIES + 1
    assert bench.total("gaps_total") == len(gaps) + 1 + 2  # each tick's latency part is a gap of the core
    first = gaps[0]
    assert bench.value("gaps_total", source=first.source, signal=first.signal, reason=str(first.reason)) == 2.0


@pytest.mark.parametrize(
    ("source", "signal", "expected"),
    [
        pytest.param("vllm", "ttft", ("vllm", "ttft"), id="known"),
        pytest.param("vllm", "vllm:mystery_total", ("vllm", "other"), id="unknown-signal"),
        pytest.param("http://prom", "ttft", ("other", "ttft"), id="unknown-source"),
    ],
)
def test_gap_labels_are_names_we_know(bench: Bench, source: str, signal: str, expected: tuple[str, str]) -> None:
    run_tick(bench, gaps=(a_gap(source=source, signal=signal),))
    assert bench.value("gaps_total", source=expected[0], signal=expected[1], reason="timeout") == 1.0


def test_a_forgotten_policy_leaves_no_series(bench: Bench, sink: Sink) -> None:
    for name in ("chat", "code"):
        bench.telemetry.loaded(a_policy(name))
    run_tick(bench, gaps=(a_gap(),))
    bench.telemetry.learned("chat", 0.015, 6e-5, 2e-5, 4e-8, 20, None)
    bench.telemetry.error("chat", "bug", KeyError("x"))
    bench.telemetry.forget("chat")
    bench.telemetry.forget("never-loaded")
    assert {dict(labels).get("policy") for _, labels in bench.series()} == {"code", None}
    bench.telemetry.loaded(a_policy("chat"))
    run_tick(bench, gaps=(a_gap(),))
    assert bench.value("ticks_total") == 1.0
    assert bench.value("tick_duration_seconds_bucket", le="+Inf") == 1.0
    assert len(sink.events("gap")) == 2


def test_a_reload_keeps_counters_and_takes_up_bounds(bench: Bench) -> None:
    bench.telemetry.loaded(a_policy())
    run_tick(bench)
    bench.telemetry.loaded(replace(a_policy(), replicas=ReplicaBounds(min=1, max=20), dry_run=True))
    assert (bench.value("min_replicas"), bench.value("max_replicas"), bench.value("dry_run")) == (1.0, 20.0, 1.0)
    assert bench.value("ticks_total") == 1.0


def test_learned_values(bench: Bench) -> None:
    bench.telemetry.learned("chat", 0.015, 6e-5, 2e-5, 4e-8, 21, 185.0)
    terms = {"base": 0.015, "prefill_token": 6e-5, "sequence": 2e-5, "resident_token": 4e-8}
    assert {term: bench.value("step_time_seconds", term=term) for term in terms} == terms
    assert bench.value("step_time_rows") == 21.0
    assert bench.value("learned_horizon_seconds") == 185.0
    bench.telemetry.learned("chat", 0.015, math.nan, 2e-5, 4e-8, 21, None)
    assert bench.value("step_time_seconds", term="prefill_token") is None
    assert bench.value("learned_horizon_seconds") is None


def test_a_name_has_one_owner(bench: Bench) -> None:
    with pytest.raises(ValueError, match="autoscaler_ticks"):
        Counter("autoscaler_ticks", "Somebody else's.", registry=bench.registry)


# --- troubles without floods ----------------------------------------------------------------------------------------


def test_a_lasting_gap_is_two_lines(bench: Bench, sink: Sink) -> None:
    for tick in range(100):
        run_tick(bench, at=1000.0 + 5.0 * tick, gaps=(a_gap(detail=f"no page for {3.1 + tick} s"),))
    for tick in range(100, 120):
        run_tick(bench, at=1000.0 + 5.0 * tick)
    (begun,), (ended,) = sink.events("gap"), sink.events("gap_ended")
    assert (begun["level"], begun["policy"], begun["source"], begun["signal"], begun["reason"], begun["detail"]) == (
        "warning",
        "chat",
        "vllm",
        "*",
        "timeout",
        "no page for 3.1 s",
    )
    assert (ended["level"], ended["reason"], ended["count"]) == ("info", "timeout", 1)
    assert bench.value("gaps_total", source="vllm", signal="*", reason="timeout") == 100.0


def test_a_gap_that_comes_and_goes_is_one_line(bench: Bench, sink: Sink) -> None:
    for tick in range(100):
        run_tick(bench, at=1000.0 + 5.0 * tick, gaps=(a_gap(),) if tick % 3 else ())
    assert len(sink.events("gap")) == 1
    assert sink.events("gap_ended") == []


@pytest.mark.parametrize(
    ("second", "lines"),
    [
        pytest.param(a_gap(detail="another text"), 2, id="text-changed"),
        pytest.param(a_gap(GapReason.STALE, detail="one text"), 2, id="reason-changed"),
        pytest.param(a_gap(pod="chat-2", detail="one text"), 2, id="another-pod"),
        pytest.param(a_gap(detail="one text"), 1, id="the-same"),
    ],
)
def test_gap_lines_follow_changes(bench: Bench, sink: Sink, second: Gap, lines: int) -> None:
    run_tick(bench, at=1000.0, gaps=(a_gap(detail="one text"),))
    run_tick(bench, at=1005.0, gaps=(second,))
    assert len(sink.events("gap")) == lines


def test_a_gap_is_said_again_when_it_comes_back(bench: Bench, sink: Sink) -> None:
    run_tick(bench, at=1000.0, gaps=(a_gap(detail="one text"),))
    run_tick(bench, at=1100.0)
    run_tick(bench, at=1105.0, gaps=(a_gap(detail="one text"),))
    assert [line["event"] for line in sink.events() if line["event"] != "decision"] == ["gap", "gap_ended", "gap"]


def test_many_pods_are_one_line(bench: Bench, sink: Sink) -> None:
    run_tick(bench, gaps=tuple(a_gap(pod=f"chat-{n}", detail=f"10.0.0.{n} refused") for n in range(200)))
    run_tick(bench, at=2000.0)
    (begun,), (ended,) = sink.events("gap"), sink.events("gap_ended")
    assert (begun["count"], begun["pods"]) == (200, ["chat-0", "chat-1", "chat-2"])
    assert ended["count"] == 200


def test_quiet_time_follows_a_slow_interval(bench: Bench, sink: Sink) -> None:
    bench.telemetry.loaded(a_policy(interval_s=120.0))
    for tick in range(4):
        run_tick(bench, at=1000.0 + 120.0 * tick, gaps=(a_gap(),) if tick != 2 else ())
    assert len(sink.events("gap")) == 1


def test_a_known_error_is_one_line_until_it_ends(bench: Bench, sink: Sink) -> None:
    for attempt in range(50):
        bench.telemetry.error("chat", "target", TargetError("unreachable", f"after {attempt}.5 s"))
    bench.telemetry.error("chat", "target", TargetError("forbidden", "cannot get deployments"))
    first, second = sink.events("tick_failed")
    assert (first["level"], first["kind"], first["error"]) == ("warning", "target", "TargetError")
    assert first["detail"] == "unreachable: after 0.5 s"
    assert "exception" not in first
    assert second["detail"] == "forbidden: cannot get deployments"
    assert bench.value("tick_errors_total", kind="unreachable") == 50.0
    run_tick(bench, at=2000.0)
    bench.telemetry.error("chat", "target", TargetError("unreachable", "after 0.5 s"))
    assert len(sink.events("tick_failed")) == 3


def test_a_refused_write_is_one_line_while_it_repeats(bench: Bench, sink: Sink) -> None:
    run_tick(bench, at=995.0)
    for tick in range(50):
        bench.telemetry.error("chat", "actuation", ActuationError("forbidden", "cannot patch deployments/scale"))
        run_tick(bench, at=1000.0 + 5.0 * tick)
    assert len(sink.events("tick_failed")) == 1
    assert bench.value("tick_errors_total", kind="forbidden") == 50.0


def test_a_bug_comes_with_its_traceback(bench: Bench, sink: Sink) -> None:
    def collect() -> None:
        raise KeyError("gpu")

    for _ in range(3):
        try:
            collect()
        except KeyError as error:
            bench.telemetry.error("chat", "bug", error)
    (line,) = sink.events("tick_failed")
    assert line["level"] == "error"
    assert "in collect" in line["exception"]
    assert "KeyError: 'gpu'" in line["exception"]
    assert bench.value("tick_errors_total", kind="bug") == 3.0


def test_overruns_in_a_row_are_one_line(bench: Bench, sink: Sink) -> None:
    bench.telemetry.loaded(a_policy(interval_s=15.0))
    for tick in range(3):
        run_tick(bench, at=1000.0 + 45.0 * tick)
        bench.telemetry.overrun("chat")
    assert len(sink.events("tick_overrun")) == 1
    assert bench.value("tick_overruns_total") == 3.0
    run_tick(bench, at=1300.0)
    bench.telemetry.overrun("chat")
    assert len(sink.events("tick_overrun")) == 2


def test_pods_that_were_told_limits_are_counted_and_each_that_fails_is_said_once(bench: Bench, sink: Sink) -> None:
    run_tick(bench)
    bench.telemetry.batching_pod("chat", "chat-1", "")
    for pod in ("chat-2", "chat-2", "chat-3"):
        bench.telemetry.batching_pod("chat", pod, "HTTP 503")
    counts = {result: bench.value("batching_pods_total", result=result) for result in ("taken", "failed")}
    assert counts == {"taken": 1.0, "failed": 3.0}
    assert [line["pod"] for line in sink.events("batching_limits_not_taken")] == ["chat-2", "chat-3"]


def test_deletion_costs_are_counted_and_the_first_of_a_row_that_fails_is_logged(bench: Bench, sink: Sink) -> None:
    bench.telemetry.loaded(a_policy())
    run_tick(bench)
    bench.telemetry.deletion_cost("chat", "written", "")
    for pod in ("chat-1", "chat-2"):
        bench.telemetry.deletion_cost("chat", "failed", f"{pod}: forbidden")
    bench.telemetry.deletion_cost("chat", "made up", "")
    counts = {result: bench.value("deletion_costs_total", result=result) for result in ("written", "failed", "other")}
    assert counts == {"written": 1.0, "failed": 2.0, "other": 1.0}
    (line,) = sink.events("deletion_cost_not_written")
    assert (line["level"], line["policy"], line["detail"]) == ("warning", "chat", "chat-1: forbidden")
    assert "chat-1" not in generate_latest(bench.registry).decode()


def test_a_decision_names_the_pods_that_are_to_go(bench: Bench, sink: Sink) -> None:
    costs = [DeletionCost(pod=f"chat-{index}", uid="u", cost=-1, requests=float(index)) for index in range(6)]
    costs[1] = replace(costs[1], cost=None, requests=None)
    down = ScaleReplicas(seen=7, to=1, costs=tuple(costs))
    bench.telemetry.tick("chat", a_snapshot(), a_decision(action=down), Outcome.APPLIED, 0.1)
    bench.telemetry.tick("chat", a_snapshot(), a_decision(), Outcome.APPLIED, 0.1)
    first, second = sink.events("decision")
    assert first["deletion_costs"][:3] == ["chat-0 -1 (0 requests)", "chat-1 none", "chat-2 -1 (2 requests)"]
    assert (len(first["deletion_costs"]), first["deletion_costs"][-1]) == (6, "and 1 more")
    assert "deletion_costs" not in second


def test_reloads(bench: Bench, sink: Sink) -> None:
    problem = Problem("p.yaml", "spec.replicas.max", "0", "must be at least 1")
    bench.telemetry.reload("rejected", [problem])
    bench.telemetry.reload("rejected", [problem])
    bench.telemetry.reload("applied")
    bench.telemetry.reload("rejected", [problem])
    bench.telemetry.reload("made up")
    lines = [(line["level"], line["result"], line.get("problems")) for line in sink.events("policies_reloaded")]
    rejected = ("warning", "rejected", ["p.yaml: spec.replicas.max = 0: must be at least 1"])
    assert lines == [rejected, ("info", "applied", None), rejected, ("info", "made up", None)]
    counted = {
        dict(labels)["result"]: value
        for (name, labels), value in bench.series().items()
        if name == "autoscaler_policy_reloads_total"
    }
    assert counted == {"rejected": 3.0, "applied": 1.0, "other": 1.0}


def test_events_are_counted_and_the_first_of_a_row_that_is_lost_is_logged(bench: Bench, sink: Sink) -> None:
    for result in ("written", "failed", "dropped", "failed", "written", "failed", "made up"):
        bench.telemetry.event(result, f"detail of {result}")
    lines = [(line["result"], line["detail"]) for line in sink.events("events_not_written")]
    assert lines == [("failed", "detail of failed")] * 2
    counted = {
        dict(labels)["result"]: value
        for (name, labels), value in bench.series().items()
        if name == "autoscaler_events_total"
    }
    assert counted == {"written": 2.0, "failed": 3.0, "dropped": 1.0, "other": 1.0}


def test_no_data_alert(bench: Bench, sink: Sink) -> None:
    bench.telemetry.loaded(a_policy(evidence=Evidence(alert_after_s=60.0)))
    seen = []
    for at, score in ((0, None), (55, NO_SCORE), (60, NO_SCORE), (65, None), (70, SCORE), (125, NO_SCORE), (130, None)):
        run_tick(bench, at=1000.0 + at, score=score)
        seen.append(bench.value("no_data"))
    assert seen == [0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0]
    assert [line["event"] for line in sink.events() if line["event"] != "decision"] == [
        "no_data",
        "data_again",
        "no_data",
    ]


def test_what_is_not_asked_for_is_no_gap(bench: Bench) -> None:
    unasked = GapReason.NOT_CONFIGURED
    decision = a_decision(score=None, demand=Demand(gap=unasked))
    decision = replace(decision, forecast=Forecast(horizon_s=180.0, gap=unasked))
    bench.telemetry.tick("chat", a_snapshot(), decision, Outcome.UNCHANGED, 0.1)
    assert bench.total("gaps_total") == 0.0


def test_a_target_at_zero_needs_no_data(bench: Bench) -> None:
    bench.telemetry.loaded(a_policy())
    for at in (1000.0, 9000.0):
        decision = a_decision(at, score=None, action=Hold(), reason=Reason.SCALED_TO_ZERO)
        bench.telemetry.tick("chat", a_snapshot(at, current=0), decision, Outcome.UNCHANGED, 0.1)
    assert bench.value("no_data") == 0.0


# --- docs -----------------------------------------------------------------------------------------------------------


def table_rows(page: str, heading: str) -> list[list[str]]:
    """Return the cells of the table rows under a heading of a page, header and rule left out."""
    text = (DOCS / page).read_text()
    section = text.split(f"\n{heading}\n", 1)[1].split("\n#", 1)[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("|")
    ]
    return rows[2:]


def test_docs_name_every_metric() -> None:
    text = (DOCS / "metrics.md").read_text().split("\n## Labels\n")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| `")
    ]
    documented = [(row[0].strip("`"), row[1], tuple(re.findall(r"`(\w+)`", row[2]))) for row in rows]
    assert documented == [(family.full_name, family.kind, family.labels) for family in FAMILIES]
    assert all(row[3] for row in rows)


def test_docs_name_every_label() -> None:
    documented = [row[0].strip("`") for row in table_rows("metrics.md", "## Labels")]
    assert sorted(documented) == sorted({label for family in FAMILIES for label in family.labels})


def test_docs_queries_use_metrics_that_exist() -> None:
    used = set(re.findall(r"\bautoscaler_\w+", "".join(path.read_text() for path in DOCS.glob("*.md"))))
    assert used <= {family.full_name for family in FAMILIES}


def test_docs_name_every_reason() -> None:
    headings = {"### Scale up": "up_", "### Scale down": "down_", "### Either way": "pinned", "### Hold": ""}
    documented = []
    for heading, prefix in headings.items():
        rows = table_rows("reasons.md", heading)
        assert all(row[0].startswith(f"`{prefix}") and row[1] and row[2] for row in rows)
        documented += [row[0].strip("`") for row in rows]
    assert sorted(documented) == sorted(map(str, Reason))


@pytest.mark.parametrize(
    ("heading", "codes"),
    [
        pytest.param("## Reasons of gaps", sorted(map(str, GapReason)), id="gaps"),
        pytest.param("## Reasons of the batching limits", sorted(map(str, BatchReason)), id="batching"),
        pytest.param("## Errors", sorted({*ERROR_KINDS, "other"}), id="errors"),
    ],
)
def test_docs_name_every_code(heading: str, codes: list[str]) -> None:
    rows = table_rows("reasons.md", heading)
    assert sorted(row[0].strip("`") for row in rows) == codes
    assert all(row[1] and row[2] for row in rows)


FIELD_NAMES = """
    sample_rejected_total series_ignored_total source_empty_total partial_response_total parse_error_total
    tick_overrun_total tick_errors_total no_data insufficient_components partial_no_shrink pending_capacity
    unschedulable rollout_unhealthy quota would_rebound unstable_pods unsafe_drain conflict writer_conflict
    forbidden unauthorized target_not_found
"""


def test_docs_translate_the_names_of_the_field() -> None:
    rows = table_rows("reasons.md", "## Names used elsewhere")
    there = set(re.findall(r"`([a-z_]+)", " ".join(row[0] for row in rows)))
    assert set(FIELD_NAMES.split()) <= there
    ours = {*map(str, Reason), *map(str, GapReason), *ERROR_KINDS, *map(str, Outcome)}
    named = {name for row in rows for name in re.findall(r"`([a-z_?]+)`", row[1]) if not name.startswith("autoscaler_")}
    assert named <= ours | {"idle"}
