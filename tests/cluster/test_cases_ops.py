"""cases.md, ops, against a real API server.

C143 is in `test_watch.py` for pods, and in `tests/sources/test_prometheus_api.py` for names.
"""

import asyncio
import gzip
import json
import signal
import ssl
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from prometheus_client import generate_latest

from autoscaler.core.types import Hold, Outcome, Reading, TargetStatus
from autoscaler.loop import Parts
from autoscaler.testbed.api import Json
from tests.cluster.daemon import page, running_daemon, series, total
from tests.cluster.inside import Inside, JumpingClock, ShiftedClock, running_inside
from tests.cluster.manifests import Place, deployment, eventually, grant, new_place, policy
from tests.cluster.proxy import Proxy, status_of
from tests.cluster.site import DEPLOYED, Site, site_of
from tests.test_loop import resident_mb, sockets

SCALE = "/deployments/.*/scale$"


def with_servers(path: Path, servers: str) -> Path:
    """Add to a policy's signals, and return its path."""
    path.write_text(path.read_text().replace("  signals: {", f"  signals: {{{servers}, "))
    return path


# --- C140 -----------------------------------------------------------------------------------------------------------


class BadOnce:
    """A source that dies of a bug at its fifth reading, and has nothing to say otherwise."""

    name = "vllm"

    def __init__(self) -> None:
        self.reads = 0

    async def read(self, target: TargetStatus, at: float) -> Reading:
        """Return nothing."""
        self.reads += 1
        if self.reads == 5:
            raise KeyError("spec")
        return Reading()

    async def close(self) -> None:
        """Do nothing."""


async def test_c140_one_bad_tick_is_one_bad_tick(site: Site, tmp_path: Path) -> None:
    place = site.place
    await place.create(deployment(replicas=1))
    bad = BadOnce()

    def with_it(parts: Parts) -> Parts:
        return replace(parts, sources=(*parts.sources, bad))

    rules = policy(tmp_path, place.plane, place.namespace)
    async with running_inside(site.kubeconfig, rules, alter=with_it) as run:
        await run.until(lambda _tick: bad.reads >= 6)
    (line,) = [line for line in run.lines if line["event"] == "tick_failed"]
    assert (line["kind"], type(line["exc_info"])) == ("bug", KeyError)
    assert run.total("tick_errors_total", kind="bug") == 1.0
    assert run.total("ticks_total") >= 6.0


DYING = """
import asyncio
from autoscaler import loop

run = loop.Supervisor.run

async def run_and_die(self, stop):
    def cancel():
        next(task for task in asyncio.all_tasks() if task.get_name() == "chat").cancel()
    asyncio.get_running_loop().call_later(2.0, cancel)
    await run(self, stop)

loop.Supervisor.run = run_and_die
from autoscaler.cli import main
main()
"""


async def test_c140_a_dead_task_ends_the_process(site: Site, tmp_path: Path) -> None:
    place = site.place
    await place.create(deployment(replicas=1))
    rules = policy(tmp_path, place.plane, place.namespace)
    async with running_daemon(site.kubeconfig, rules, entry=(sys.executable, "-c", DYING, "run")) as daemon:
        await daemon.until("decision")
        crashed = await daemon.until("crashed")
        assert "a bug cancelled the task chat" in crashed["exception"]
        assert await daemon.ended() != 0


async def test_c140_a_dead_watch_is_no_sign_of_life(site: Site, tmp_path: Path) -> None:
    place = site.place
    await place.create(deployment(replicas=1))
    rules, clock = policy(tmp_path, place.plane, place.namespace), ShiftedClock()
    async with running_inside(site.kubeconfig, rules, clock=clock) as run:
        await run.until(lambda tick: tick.snapshot.target.ready_replicas == 1)
        assert run.health.live()[0]
        name = f"watch {place.namespace}/pods"
        next(task for task in asyncio.all_tasks() if task.get_name() == name).cancel()

        async def is_noticed() -> bool:
            return run.total("tick_errors_total", kind="bug") >= 1.0

        await eventually(is_noticed, "bug that is counted")
        ticks = len(run.ticks)
        assert run.health.live()[0]
        clock.shift_s += 61.0
        assert not run.health.live()[0]
        assert len(run.ticks) == ticks


# --- C141 -----------------------------------------------------------------------------------------------------------


async def test_c141_two_thousand_ticks_open_nothing_new(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = site.place
    await place.create(deployment(replicas=2))
    await place.until_ready(2)
    made = 0
    create = ssl.create_default_context

    def counting(*args: object, **kwargs: object) -> ssl.SSLContext:
        nonlocal made
        made += 1
        return create(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(ssl, "create_default_context", counting)
    rules = policy(tmp_path, place.plane, place.namespace, replicas="{min: 2, max: 2}")
    measured: list[tuple[int, float]] = []
    async with running_inside(site.kubeconfig, rules, clock=JumpingClock()) as run:
        for _ in range(4):
            run.ticks.clear()
            await run.until(lambda _tick: len(run.ticks) >= 500)
            assert run.ticks[-1].snapshot.gaps == ()
            run.ticks.clear()
            run.lines.clear()
            measured.append((sockets(), resident_mb()))
    assert made <= 3
    assert len({count for count, _ in measured}) == 1
    assert measured[-1][1] - measured[0][1] < 20.0


# --- C144 -----------------------------------------------------------------------------------------------------------


async def test_c144_credentials_in_logs(
    place: Place, proxy: Proxy, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Everything that comes out of the process is looked at; the server that refuses the token says it aloud."""
    await place.create(deployment(replicas=1))
    await grant(place, DEPLOYED)
    token = await place.plane.token_for(place.namespace, "subject")
    kubeconfig = proxy.kubeconfig_for(token, tmp_path / "kubeconfig")
    password = tmp_path / "password"
    password.write_text("pw-SECRET")
    server = f"url: '{proxy.url}', username: user, passwordFile: '{password}', headers: {{X-Key: hdr-SECRET}}"
    query = "{signal: upstream_queue, server: main, query: 'sum(queue)'}"
    rules = policy(tmp_path, place.plane, place.namespace, replicas="{min: 2, max: 4}")
    with_servers(rules, f"prometheus: {{main: {{{server}}}}}, queries: [{query}]")
    record = tmp_path / "trace.jsonl"
    events = f"/api/v1/namespaces/{place.namespace}/events"

    async def is_told() -> bool:
        return "UpBounds" in {event["reason"] for event in await place.api.items(events)}

    pages = []
    async with running_daemon(kubeconfig, rules, "--log-level", "debug", "--record", record) as daemon:
        url = await daemon.url()
        gap = await daemon.until("gap", source="prometheus")
        assert "certificate verify failed" in gap["detail"]
        await daemon.until("decision", outcome="applied")
        await eventually(is_told, "Event")
        with proxy.rule(status=401, body=status_of(401, f"bad credentials: Bearer {token}")):
            proxy.cut()
            failed = await daemon.until("tick_failed")
            assert failed["detail"].startswith("unauthorized")
            pages += [(await page(url, path)).text for path in ("/", "/metrics", "/healthz", "/readyz")]
        assert await daemon.end(signal.SIGTERM) == 0
    kept = [await place.api.items(events), await place.read()]
    recorded = gzip.decompress(record.read_bytes()).decode()
    assert proxy.url in recorded  # the policy is in it
    out, err = capfd.readouterr()
    shown = [json.dumps([daemon.seen, kept]), *pages, recorded, out, err]
    for secret in (token, token.split(".")[-1], "pw-SECRET", "hdr-SECRET", "dXNlcjpwdy1TRUNSRVQ="):
        assert not [text for text in shown if secret in text]


async def test_c144_credentials_in_a_policy_are_refused_and_not_repeated(
    site: Site, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rules = policy(tmp_path, site.place.plane, site.place.namespace)
    with_servers(rules, "prometheus: {main: {url: 'https://user:pw-SECRET@prom:9090'}}")
    async with running_daemon(site.kubeconfig, rules, "--log-level", "debug") as daemon:
        assert await daemon.ended() == 2
    out, err = capfd.readouterr()
    assert "must not hold credentials" in err
    assert "pw-SECRET" not in json.dumps(daemon.seen) + out + err


# --- C146 -----------------------------------------------------------------------------------------------------------


async def test_c146_the_specific_reason_is_kept(site: Site, tmp_path: Path) -> None:
    place = site.place
    await place.create(deployment(replicas=1, fake={"cold-start-seconds": 5}))
    await place.until_ready(1)
    more = "  sizing: score\n  score: {minKnownWeight: 1}\n  scaleUp: {cooldown: 0s, stabilization: 0s}\n"
    rules = policy(tmp_path, place.plane, place.namespace, replicas="{min: 1, max: 4}", more=more)
    async with running_daemon(site.kubeconfig, rules) as daemon:
        url = await daemon.url()
        first = await daemon.until("decision")
        assert (first["action"], first["reason"]) == ("hold", "insufficient_components")
        await place.tell(await place.list_pods(), rps=2, running=64, kv=0.98, waiting=120, queue=6, ttft=6)
        up = await daemon.until("decision", outcome="applied")
        loading = await daemon.until("decision", reason="pending_capacity")
        assert (loading["action"], loading["outcome"]) == ("hold", "unchanged")
        assert loading["desired_replicas"] == up["desired_replicas"]
        counted = await series(url)
        assert await daemon.end(signal.SIGTERM) == 0
    sums = {
        name: sum(value for (known, _), value in counted.items() if known == name)
        for name in ("ticks_total", "decisions_total", "actions_total")
    }
    assert len(set(sums.values())) == 1
    assert sums["ticks_total"] >= 3.0


# --- C147 -----------------------------------------------------------------------------------------------------------


async def test_c147_a_tick_takes_longer_than_the_interval(site: Site, tmp_path: Path) -> None:
    place = site.place
    await place.create(deployment(replicas=1))
    pods = await place.until_ready(1)
    rules = policy(tmp_path, place.plane, place.namespace)
    rules.write_text(rules.read_text().replace("timeout: 900ms", "timeout: 3s"))
    async with running_daemon(site.kubeconfig, rules) as daemon:
        url = await daemon.url()
        first = await daemon.until("decision", ready_replicas=1)
        before = await total(url, "tick_overruns_total")
        assert before is not None
        await place.tell(pods, hang=1.6, rps=2)
        slow = [await daemon.until("decision") for _ in range(4)]
        after = await total(url, "tick_overruns_total")
        assert after is not None
        assert after - before >= 3.0
        await place.tell(pods, hang=0, rps=2)
        quick = [await daemon.until("decision") for _ in range(4)]
        assert await daemon.end(signal.SIGTERM) == 0
    # The first of them may have begun before the pods were slow.
    assert min(later["at"] - one["at"] for one, later in pairwise(slow[1:])) > 1.5
    # As many as fit: nothing that was missed is made up for.
    assert len(slow) + len(quick) <= quick[-1]["at"] - first["at"] + 1.5
    assert quick[-1]["gaps"] == {}


# --- C149 -----------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def hanging_server() -> AsyncIterator[str]:
    """Serve at the URL that is given: it takes every connection, and never says a word."""

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(listen, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def test_c149_one_broken_target_does_not_stop_the_others(site: Site, tmp_path: Path) -> None:
    """The second target is in a namespace of which the account may see nothing; later it may, and Prometheus hangs."""
    place, names = site.place, ("chat", "mail")
    for name in names:
        await place.create(deployment(name, replicas=2))
    other = await new_place(place.plane, place.api, f"{place.namespace}-other")
    await other.create(deployment("code", replicas=2))
    rules = [policy(tmp_path, place.plane, place.namespace, name=name, replicas="{min: 3, max: 4}") for name in names]
    async with hanging_server() as prometheus:
        broken = policy(tmp_path, place.plane, other.namespace, name="code", replicas="{min: 1, max: 4}")
        query = "{signal: upstream_queue, server: main, query: 'sum(queue)'}"
        with_servers(broken, f"prometheus: {{main: {{url: '{prometheus}'}}}}, queries: [{query}]")
        async with running_daemon(site.kubeconfig, *rules, broken) as daemon:
            url = await daemon.url()
            applied: dict[str, int] = {}
            while len(applied) < len(names):
                line = await daemon.until("decision", outcome="applied")
                applied[line["policy"]] = line["desired_replicas"]
            assert applied == dict.fromkeys(names, 3)
            for name in names * 2:
                await daemon.until("decision", policy=name)
            assert not [line for line in daemon.of("decision") if line["policy"] == "code"]
            assert (await total(url, "tick_errors_total", policy="code", kind="forbidden") or 0.0) >= 2.0
            await allow(other, place)
            blind = await daemon.until("decision", policy="code")
            assert "timeout" in blind["gaps"]
            assert (await total(url, "gaps_total", policy="code", source="prometheus") or 0.0) >= 1.0
            for name in names * 2:
                await daemon.until("decision", policy=name)
            for name in names:
                assert await total(url, "tick_errors_total", policy=name) is None
                assert await total(url, "gaps_total", policy=name, source="prometheus") is None
            assert await daemon.end(signal.SIGTERM) == 0
    for name in names:
        at = [line["at"] for line in daemon.of("decision") if line["policy"] == name]
        assert max(later - one for one, later in pairwise(at)) < 3.0
    await place.api.request("DELETE", f"/api/v1/namespaces/{other.namespace}")


async def allow(other: Place, place: Place) -> None:
    """Let the account of one namespace do in another what deploy/ lets it do in its own."""
    rules = [{"apiGroups": [group], "resources": [resource], "verbs": [verb]} for group, resource, verb in DEPLOYED]
    rbac = {"apiVersion": "rbac.authorization.k8s.io/v1", "metadata": {"name": "guest"}}
    await other.apply(
        {**rbac, "kind": "Role", "rules": rules},
        {
            **rbac,
            "kind": "RoleBinding",
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "guest"},
            "subjects": [{"kind": "ServiceAccount", "name": "subject", "namespace": place.namespace}],
        },
    )


# --- C150 -----------------------------------------------------------------------------------------------------------


async def test_c150_the_wall_clock_steps_backwards(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = site.place
    await place.create(deployment(replicas=1, fake={"cold-start-seconds": 0.2}))
    pods = await place.until_ready(1)
    more = "  cooldown: 4s\n  score: {warmUp: 0s}\n  scaleUp: {threshold: 0.6, maxStep: 1, stabilization: 0s}\n"
    rules = policy(tmp_path, place.plane, place.namespace, replicas="{min: 1, max: 3}", more=more)
    wall = time.time
    async with running_inside(site.kubeconfig, rules) as run:
        await run.until(lambda tick: tick.snapshot.target.ready_replicas == 1)
        await place.tell(pods, rps=20, running=64, kv=0.98, ttft=6)
        first = await run.until(lambda tick: tick.outcome is Outcome.APPLIED)
        monkeypatch.setattr(time, "time", lambda: wall() - 7200.0)
        since = len(run.ticks)
        await place.tell(await place.until_ready(2), rps=20, running=64, kv=0.98, ttft=6)
        held = await run.until(lambda tick: str(tick.decision.reason) == "held_cooldown", since)
        second = await run.until(lambda tick: tick.outcome is Outcome.APPLIED, since)
        assert isinstance(held.decision.action, Hold)
        assert second.snapshot.at - first.snapshot.at >= 4.0
        assert second.snapshot.gaps == ()
    at = [tick.snapshot.at for tick in run.ticks]
    assert all(later > one for one, later in pairwise(at))


# --- C152 -----------------------------------------------------------------------------------------------------------


async def test_c152_dry_run_writes_nothing_anywhere(site: Site, tmp_path: Path) -> None:
    """No Lease either, although one is given: a dry-run needs none. Batching limits are nobody's to write yet."""
    place = site.place
    await grant(place, DEPLOYED | {("", "pods", "patch")}, "dry")
    dry = await site_of(place, "dry", tmp_path)
    for name, replicas in (("low", 1), ("high", 4), ("busy", 1)):
        await place.create(deployment(name, replicas=replicas, gpus=0))
    (busy,) = await until_pods(place, "busy", 1)
    await place.tell([busy], rps=2, running=64, kv=0.9, waiting=120, queue=6, ttft=6)
    await until_pods(place, "high", 4)
    more = "  scaleDown: {victims: {order: emptiest}}\n"
    rules = [
        policy(tmp_path, place.plane, place.namespace, name="low", replicas="{min: 2, max: 4}"),
        policy(tmp_path, place.plane, place.namespace, name="high", replicas="{min: 1, max: 2}", more=more),
        policy(tmp_path, place.plane, place.namespace, name="busy", replicas="{min: 1, max: 4}"),
    ]
    lease = f"{place.namespace}/autoscaler"
    async with running_daemon(dry.kubeconfig, *rules, "--dry-run", "--lease", lease) as daemon:
        url = await daemon.url()
        wanted: dict[str, Json] = {}
        while len(wanted) < len(rules):
            line = await daemon.until("decision", outcome="simulated")
            wanted.setdefault(line["policy"], line)
        reasons = {name: line["reason"] for name, line in wanted.items()}
        assert (reasons["low"], reasons["high"], reasons["busy"][:3]) == ("up_bounds", "down_bounds", "up_")
        assert all(line["dry_run"] for line in wanted.values())
        await daemon.until("decision", policy="busy")
        assert await total(url, "events_total") is None
        assert await daemon.end(signal.SIGTERM) == 0
    asked = {event.verb for event in await place.plane.audit() if event.user == dry.user}
    assert asked == {"list", "watch"}
    pods = await place.list_pods()
    assert not [pod for pod in pods if "pod-deletion-cost" in json.dumps(pod["metadata"].get("annotations", {}))]
    assert len(pods) == 6


async def until_pods(place: Place, name: str, count: int) -> list[Json]:
    """Return the pods of a Deployment once so many are ready."""

    def mine(pods: list[Json]) -> list[Json]:
        return [
            pod
            for pod in pods
            if pod["metadata"]["labels"]["app"] == name
            and any(one["type"] == "Ready" and one["status"] == "True" for one in pod["status"].get("conditions", ()))
        ]

    return mine(await place.until(lambda pods: len(mine(pods)) == count, f"{count} ready pods of {name}"))


# --- C154 -----------------------------------------------------------------------------------------------------------


def complaint(number: int) -> Json:
    """Return a refusal that reads differently each time."""
    word = "".join(chr(ord("a") + int(digit)) for digit in str(number))
    return status_of(500, f"trouble {word} with pod chat-{word} at https://10.0.0.{number % 250}/{word}")


async def test_c154_label_explosion_in_our_own_exporter(site: Site, proxy: Proxy, tmp_path: Path) -> None:
    """A hundred pods come and go, and 300 writes are refused, each in other words. Ticks take no time."""
    place = site.place
    names = [f"model-{number}" for number in range(5)]
    for name in names:
        await place.create(deployment(name, replicas=4, gpus=0, fake={"cold-start-seconds": 0.1}))
    rules = [policy(tmp_path, place.plane, place.namespace, name=name, replicas="{min: 5, max: 6}") for name in names]
    token = await place.plane.token_for(place.namespace, "subject")
    kubeconfig = proxy.kubeconfig_for(token, tmp_path / "behind")
    seen: set[str] = set()

    def are_new(pods: list[Json]) -> bool:
        return len({*names_of(pods)} - seen) >= 20

    with proxy.rule(method="PATCH", path=SCALE, status=500, body=complaint) as rule:
        async with running_inside(kubeconfig, *rules, clock=JumpingClock()) as run:
            for _ in range(5):
                seen.update(names_of(await place.until(are_new, "20 new pods")))
                await place.api.request("DELETE", place.pods, {"gracePeriodSeconds": 0})

            async def is_enough() -> bool:
                return rule.hits >= 300

            await eventually(is_enough, "300 refusals")
            text = generate_latest(run.registry).decode()
            assert render_s(run) < 0.1
    assert len(seen) >= 100
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert len(lines) < 500
    assert not [line for line in lines if any(name in line for name in seen)]
    assert "trouble" not in text
    assert "10.0.0." not in text
    assert run.total("tick_errors_total", kind="unreachable") >= 300.0


def names_of(pods: list[Json]) -> list[str]:
    return [pod["metadata"]["name"] for pod in pods]


def render_s(run: Inside) -> float:
    """Return how long the page takes, at its best of five."""
    took = []
    for _ in range(5):
        since = time.perf_counter()
        generate_latest(run.registry)
        took.append(time.perf_counter() - since)
    return min(took)
