"""The operator's endpoints over real HTTP on loopback."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from autoscaler.errors import AutoscalerError
from autoscaler.web.server import Health, parse_listen, serve


class FakeClock:
    """A fake clock that stands still until it is set; nothing sleeps on it."""

    def __init__(self) -> None:
        self.time = 1000.0

    def now(self) -> float:
        return self.time

    async def sleep_until(self, at: float) -> None:
        self.time = max(self.time, at)


class Client:
    """A served registry and health, and a session to ask with."""

    def __init__(self, url: str, session: aiohttp.ClientSession, health: Health, clock: FakeClock) -> None:
        self.url, self.session, self.health, self.clock = url, session, health, clock

    async def get(self, path: str) -> tuple[int, str, str]:
        async with self.session.get(self.url + path) as response:
            return response.status, response.headers["Content-Type"], await response.text()

    async def json(self, path: str) -> tuple[int, Any]:
        async with self.session.get(self.url + path) as response:
            return response.status, await response.json()


@asynccontextmanager
async def serving(registry: CollectorRegistry | None = None, listen: str = "127.0.0.1:0") -> AsyncIterator[Client]:
    clock = FakeClock()
    health = Health(clock)
    async with serve(listen, registry or CollectorRegistry(), health) as url, aiohttp.ClientSession() as session:
        yield Client(url, session, health, clock)


# --- pages ----------------------------------------------------------------------------------------------------------


async def test_metrics_page() -> None:
    registry = CollectorRegistry()
    counter = Counter("seen", "How often.", registry=registry)
    async with serving(registry) as client:
        assert (await client.get("/metrics"))[:2] == (200, "text/plain; version=0.0.4; charset=utf-8")
        counter.inc(3)
        assert "\nseen_total 3.0\n" in (await client.get("/metrics"))[2]


class _Thread(Collector):
    """Notes which thread renders it."""

    def __init__(self) -> None:
        self.thread = 0

    def collect(self) -> Iterator[Metric]:
        self.thread = threading.get_ident()
        yield GaugeMetricFamily("thread", "Nothing.", value=1.0)


async def test_c154_metrics_are_rendered_off_the_decision_path() -> None:
    registry, collector = CollectorRegistry(), _Thread()
    registry.register(collector)
    async with serving(registry) as client:
        assert (await client.get("/metrics"))[0] == 200
    assert collector.thread not in (0, threading.get_ident())


async def test_index_links_the_pages() -> None:
    async with serving() as client:
        status, content_type, text = await client.get("/")
        assert (status, content_type) == (200, "text/html; charset=utf-8")
        for page in ("metrics", "healthz", "readyz"):
            assert f'href="{page}"' in text
            assert (await client.get(f"/{page}"))[0] in (200, 503)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        pytest.param("GET", "/nothing", 404, id="unknown-page"),
        pytest.param("POST", "/metrics", 405, id="nothing-is-writable"),
        pytest.param("HEAD", "/healthz", 200, id="head"),
    ],
)
async def test_other_requests(method: str, path: str, status: int) -> None:
    async with serving() as client, client.session.request(method, client.url + path) as response:
        assert response.status == status


async def test_pages_answer_side_by_side() -> None:
    async with serving() as client:
        answers = await asyncio.gather(*(client.get("/metrics") for _ in range(20)))
    assert {status for status, _, _ in answers} == {200}


# --- health ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("interval_s", "age_s", "status"),
    [
        pytest.param(5.0, 0.0, 200, id="just-ticked"),
        pytest.param(5.0, 60.0, 200, id="at-a-minute"),
        pytest.param(5.0, 60.5, 503, id="beyond-a-minute"),
        pytest.param(30.0, 90.0, 200, id="at-three-intervals"),
        pytest.param(30.0, 90.5, 503, id="beyond-three-intervals"),
    ],
)
async def test_c140_liveness_is_the_age_of_the_last_completed_tick(
    interval_s: float, age_s: float, status: int
) -> None:
    async with serving() as client:
        client.health.watch("chat", interval_s)
        client.clock.time += 20.0
        client.health.completed("chat")
        client.clock.time += age_s
        found, document = await client.json("/healthz")
        assert found == status
        assert document == {
            "status": "ok" if status == 200 else "stalled",
            "policies": {
                "chat": {
                    "age_s": age_s,
                    "limit_s": max(60.0, 3.0 * interval_s),
                    "completed": True,
                    "live": status == 200,
                }
            },
        }
        client.health.completed("chat")
        assert (await client.get("/healthz"))[0] == 200


async def test_one_stalled_policy_is_named() -> None:
    async with serving() as client:
        for policy in ("chat", "code"):
            client.health.watch(policy, 5.0)
        client.clock.time += 61.0
        client.health.completed("code")
        status, document = await client.json("/healthz")
        assert status == 503
        assert {policy: entry["live"] for policy, entry in document["policies"].items()} == {
            "chat": False,
            "code": True,
        }
        client.health.forget("chat")
        assert (await client.json("/healthz"))[0] == 200


async def test_a_policy_that_never_ticks_is_stalled() -> None:
    async with serving() as client:
        client.health.watch("chat", 5.0)
        client.clock.time += 60.0
        assert (await client.json("/healthz"))[0] == 200
        client.clock.time += 1.0
        status, document = await client.json("/healthz")
        assert (status, document["policies"]["chat"]["completed"]) == (503, False)


async def test_c099_a_target_that_was_never_seen_is_live_and_not_ready() -> None:
    async with serving() as client:
        client.health.watch("chat", 5.0)
        client.health.completed("chat", seen=False)
        assert (await client.json("/healthz"))[0] == 200
        assert await client.json("/readyz") == (503, {"status": "waiting", "waiting_for": ["chat"]})
        client.health.completed("chat")
        client.health.completed("chat", seen=False)
        assert (await client.json("/readyz"))[0] == 200


async def test_readiness_needs_a_tick_of_every_policy() -> None:
    async with serving() as client:
        assert await client.json("/readyz") == (503, {"status": "no policies", "waiting_for": []})
        client.health.watch("chat", 5.0)
        client.health.watch("code", 5.0)
        client.health.completed("chat")
        assert await client.json("/readyz") == (503, {"status": "waiting", "waiting_for": ["code"]})
        client.health.completed("code")
        assert await client.json("/readyz") == (200, {"status": "ok", "waiting_for": []})
        client.clock.time += 1e6  # an old tick is healthz' business
        assert (await client.json("/readyz"))[0] == 200
        for policy in ("chat", "code"):
            client.health.forget(policy)
        assert (await client.json("/readyz"))[0] == 503
        assert (await client.json("/healthz"))[0] == 200


async def test_a_reloaded_policy_keeps_its_pulse() -> None:
    async with serving() as client:
        client.health.watch("chat", 5.0)
        client.health.completed("chat")
        client.clock.time += 100.0
        assert (await client.json("/healthz"))[0] == 503
        client.health.watch("chat", 40.0)
        assert (await client.json("/readyz"))[0] == 200
        status, document = await client.json("/healthz")
        assert (status, document["policies"]["chat"]["age_s"], document["policies"]["chat"]["limit_s"]) == (
            200,
            100.0,
            120.0,
        )


async def test_a_tick_of_an_unwatched_policy_means_nothing() -> None:
    async with serving() as client:
        client.health.completed("gone")
        assert (await client.json("/healthz"))[1] == {"status": "ok", "policies": {}}


# --- the listen address ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("listen", "expected"),
    [
        pytest.param("127.0.0.1:9090", ("127.0.0.1", 9090), id="ipv4"),
        pytest.param("[::1]:9090", ("::1", 9090), id="ipv6"),
        pytest.param("[::]:0", ("::", 0), id="ipv6-any"),
        pytest.param("localhost:80", ("localhost", 80), id="name"),
        pytest.param(":9090", (None, 9090), id="every-interface"),
        pytest.param("9090", (None, 9090), id="port-alone"),
    ],
)
def test_listen_address(listen: str, expected: tuple[str | None, int]) -> None:
    assert parse_listen(listen) == expected


@pytest.mark.parametrize(
    "listen",
    [
        pytest.param("", id="empty"),
        pytest.param("localhost", id="no-port"),
        pytest.param("localhost:", id="empty-port"),
        pytest.param("localhost:http", id="named-port"),
        pytest.param("localhost:65536", id="port-too-high"),
        pytest.param("localhost:-1", id="negative-port"),
        pytest.param("localhost:8０", id="odd-digits"),
        pytest.param("::1:9090", id="ipv6-without-brackets"),
        pytest.param("::1", id="ipv6-without-port"),
        pytest.param("[::1]", id="brackets-without-port"),
        pytest.param("[localhost]:80", id="brackets-around-a-name"),
        pytest.param("http://localhost:80", id="url"),
        pytest.param("local host:80", id="space"),
    ],
)
async def test_bad_listen_address(listen: str) -> None:
    with pytest.raises(AutoscalerError, match=r"listen address .*: .*give HOST:PORT, \[IPV6\]:PORT, :PORT or PORT"):
        async with serving(listen=listen):
            pass


@pytest.mark.parametrize(
    "host",
    [
        pytest.param("a..b", id="no-host-name"),
        pytest.param("192.0.2.1", id="not-ours"),
    ],
)
async def test_address_that_cannot_be_bound(host: str) -> None:
    with pytest.raises(AutoscalerError, match=rf"listen address '{host}:0': ."):
        async with serving(listen=f"{host}:0"):
            pass


async def test_address_in_use() -> None:
    async with serving() as client:
        address = client.url.removeprefix("http://")
        with pytest.raises(AutoscalerError, match="address already in use"):
            async with serving(listen=address):
                pass


def _has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.skipif(not _has_ipv6(), reason="this machine has no IPv6")
async def test_ipv6_is_served() -> None:
    async with serving(listen="[::1]:0") as client:
        assert client.url.startswith("http://[::1]:")
        assert (await client.get("/healthz"))[0] == 200


async def test_the_port_is_free_afterwards() -> None:
    async with serving() as client:
        await client.get("/metrics")
        address = client.url.removeprefix("http://")
    async with serving(listen=address) as again:
        assert (await again.get("/metrics"))[0] == 200
