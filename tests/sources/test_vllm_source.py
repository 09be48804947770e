"""Scraping: what hangs, breaks or lies costs its own pod a reading, and nothing else."""

import asyncio
import errno
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from autoscaler.core.policy import VllmSignals
from autoscaler.core.signals import COLUMN
from autoscaler.core.types import WHOLE_PAGE, Gap, GapReason, Pod, PodPhase, Reading, TargetStatus
from autoscaler.sources.vllm import VllmSource

DATA = Path(__file__).parent.parent / "data" / "vllm"
GOOD = (DATA / "0.32.0" / "saturated.prom").read_bytes()

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


class FakeClock:
    """A fake: time moves only when told, sleeping ends at once and is noted."""

    def __init__(self) -> None:
        self.at = 1000.0
        self.slept_until: list[float] = []

    def now(self) -> float:
        return self.at

    async def sleep_until(self, at: float) -> None:
        self.slept_until.append(at)


class FakePods:
    """A fake: one listener per loopback address, same port, each with a canned answer.

    Closes the connection after each answer, unless the address is in `keep`. Reads no more of a request than its head.
    """

    def __init__(self) -> None:
        self.port = 0
        self.requests: Counter[str] = Counter()
        self.connections: Counter[str] = Counter()
        self.open: Counter[str] = Counter()
        self.keep: set[str] = set()
        self.heads: list[bytes] = []
        self.answers: dict[str, Answer] = {}
        self._closed = asyncio.Condition()
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def listen(self, ip: str, answer: Answer) -> None:
        """Start a pod."""
        self.answers[ip] = answer
        server = await asyncio.start_server(self._accept, ip, self.port)
        self.port = server.sockets[0].getsockname()[1]
        self._servers.append(server)

    async def close(self) -> None:
        """Stop all pods."""
        for server in self._servers:
            server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def until_open(self, ip: str, most: int) -> None:
        """Return once at most so many requests to a pod are open."""
        async with self._closed:
            await self._closed.wait_for(lambda: self.open[ip] <= most)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ip = writer.get_extra_info("sockname")[0]
        self.connections[ip] += 1
        self.open[ip] += 1
        try:
            await self._talk(ip, reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()
            async with self._closed:
                self.open[ip] -= 1
                self._closed.notify_all()

    async def _talk(self, ip: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer requests; give up when the caller hangs up first."""
        head = await reader.readuntil(b"\r\n\r\n")
        while True:
            self.heads.append(head)
            self.requests[ip] += 1
            answer = asyncio.ensure_future(self.answers[ip](writer))
            following = asyncio.ensure_future(reader.readuntil(b"\r\n\r\n"))
            try:
                await asyncio.wait({answer, following}, return_when=asyncio.FIRST_COMPLETED)
                if not answer.done() or ip not in self.keep:
                    return
                head = await following
            finally:
                answer.cancel()
                following.cancel()
                await asyncio.gather(answer, following, return_exceptions=True)


def reply(body: bytes, *, status: str = "200 OK", kind: str = "text/plain") -> Answer:
    async def answer(writer: asyncio.StreamWriter) -> None:
        head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()

    return answer


def raw(data: bytes) -> Answer:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await writer.drain()

    return answer


async def hang(_: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


async def endless(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
    while True:
        writer.write(b"# nothing but words\n" * 5000)
        await writer.drain()


@pytest.fixture
async def pods() -> AsyncIterator[FakePods]:
    fake = FakePods()
    yield fake
    await fake.close()


@asynccontextmanager
async def source(
    fake: FakePods, clock: FakeClock, *, timeout_s: float = 20.0, spread_s: float = 0.0, model_name: str = ""
) -> AsyncIterator[VllmSource]:
    settings = VllmSignals(port=fake.port, timeout_s=timeout_s, stale_after_s=15.0, model_name=model_name)
    reader = VllmSource(settings, clock, spread_s=spread_s)
    try:
        yield reader
    finally:
        await reader.close()


def pod(number: int, *, ready: bool = True, terminating: bool = False, phase: PodPhase = PodPhase.RUNNING) -> Pod:
    return Pod(
        name=f"pod-{number}",
        uid=f"uid-{number:03}",
        ip=f"127.0.1.{number}",
        ready=ready,
        terminating=terminating,
        phase=phase,
    )


def target(*members: Pod) -> TargetStatus:
    return TargetStatus(namespace="serving", name="chat", current_replicas=len(members), pods=members)


def uids(reading: Reading) -> list[str]:
    assert reading.engines is not None
    return [key.pod_uid for key in reading.engines.keys]


def read_at(reading: Reading) -> list[float]:
    assert reading.engines is not None
    times: list[float] = reading.engines.values[:, COLUMN["read_at"]].tolist()
    return times


def reasons(gaps: Sequence[Gap]) -> list[tuple[str, str, GapReason]]:
    return [(gap.signal, gap.pod, gap.reason) for gap in gaps]


async def test_reads_every_running_pod_with_an_address(pods: FakePods) -> None:
    members = (
        pod(1),
        pod(2, ready=False),
        pod(3, terminating=True),
        pod(4, phase=PodPhase.PENDING),
        Pod(name="pod-5", uid="uid-005"),
    )
    for number in (1, 2, 3, 4):
        await pods.listen(f"127.0.1.{number}", reply(GOOD))
    clock = FakeClock()
    clock.at = 1000.12345
    async with source(pods, clock) as reader:
        reading = await reader.read(target(*members), 1000.0)
        families, models = reader.families(), reader.models()
    assert uids(reading) == ["uid-001", "uid-002", "uid-003"]
    assert read_at(reading) == [1000.123] * 3
    assert reading.gaps == ()
    assert families["kv_cache_usage", "vllm:kv_cache_usage_perc"] == 3
    assert list(models.values()) == [3]


async def test_asks_for_plain_text_without_encoding(pods: FakePods) -> None:
    await pods.listen("127.0.1.1", reply(GOOD))
    async with source(pods, FakeClock()) as reader:
        await reader.read(target(pod(1)), 1000.0)
    (head,) = pods.heads
    assert head.startswith(b"GET /metrics HTTP/1.1\r\n")
    assert b"Accept: text/plain;version=0.0.4\r\n" in head
    assert b"Accept-Encoding: identity\r\n" in head


async def test_connection_is_kept_between_ticks(pods: FakePods) -> None:
    await pods.listen("127.0.1.1", reply(GOOD))
    pods.keep.add("127.0.1.1")
    async with source(pods, FakeClock()) as reader:
        for tick in range(3):
            assert uids(await reader.read(target(pod(1)), 1000.0 + tick)) == ["uid-001"]
    assert (pods.requests["127.0.1.1"], pods.connections["127.0.1.1"]) == (3, 1)


async def test_no_pods_is_an_empty_table(pods: FakePods) -> None:
    async with source(pods, FakeClock()) as reader:
        reading = await reader.read(target(), 1000.0)
    assert (uids(reading), reading.gaps) == ([], ())


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        pytest.param(hang, GapReason.TIMEOUT, id="hang"),
        pytest.param(raw(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nvllm"), GapReason.BAD_BODY, id="cut"),
        pytest.param(reply(b"broken", status="500 Internal Server Error"), GapReason.HTTP_STATUS, id="500"),
        pytest.param(reply(b"", status="302 Found"), GapReason.HTTP_STATUS, id="redirect"),
        pytest.param(reply(b"", status="401 Unauthorized"), GapReason.UNAUTHORIZED, id="401"),
        pytest.param(reply(b"", status="403 Forbidden"), GapReason.UNAUTHORIZED, id="403"),
        pytest.param(reply(b"<html>login</html>\n", kind="text/html"), GapReason.BAD_BODY, id="html"),
        pytest.param(reply(b'\n{"error": "no"}\n', kind="application/json"), GapReason.BAD_BODY, id="json"),
        pytest.param(reply(b"\x1f\x8b\x08\x00\x00\x00 packed\n"), GapReason.BAD_BODY, id="packed"),
        pytest.param(reply(b""), GapReason.NO_FAMILIES, id="empty"),
        pytest.param(reply(b"python_info 1\n"), GapReason.NO_FAMILIES, id="foreign"),
        pytest.param(endless, GapReason.BODY_TOO_LARGE, id="endless"),
        pytest.param(raw(b"SSH-2.0-nothing-of-http\r\n\r\n"), GapReason.BAD_BODY, id="not-http"),
        pytest.param(raw(b""), GapReason.UNREACHABLE, id="closes-at-once"),
    ],
)
async def test_bad_page_costs_its_own_pod_only(pods: FakePods, answer: Answer, reason: GapReason) -> None:
    await pods.listen("127.0.1.1", answer)
    await pods.listen("127.0.1.2", reply(GOOD))
    async with source(pods, FakeClock(), timeout_s=0.3 if reason is GapReason.TIMEOUT else 20.0) as reader:
        reading = await reader.read(target(pod(1), pod(2)), 1000.0)
    assert uids(reading) == ["uid-002"]
    assert reasons(reading.gaps) == [(WHOLE_PAGE, "pod-1", reason)]
    assert reading.gaps[0].source == "vllm"
    assert len(reading.gaps[0].detail) <= 200


async def test_cut_and_repeated_lines_leave_the_rest_of_the_page(pods: FakePods) -> None:
    lines = [b"running 3", b"running 5", b"waiting 7"]
    body = b"".join(b"vllm:num_requests_%b\n" % line for line in lines) + b"vllm:kv_cache_usage_perc 0."
    await pods.listen("127.0.1.1", raw(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + body))
    async with source(pods, FakeClock()) as reader:
        reading = await reader.read(target(pod(1)), 1000.0)
    assert reading.engines is not None
    assert reading.engines.values[0, COLUMN["num_requests_running"]] == 5.0
    assert reading.engines.values[0, COLUMN["num_requests_waiting"]] == 7.0
    assert ("kv_cache_usage", "pod-1", GapReason.PARSE_ERROR) in reasons(reading.gaps)


async def test_c039_one_hanging_pod_does_not_stall_the_others(pods: FakePods) -> None:
    members = [pod(number) for number in range(1, 9)]
    for member in members:
        await pods.listen(member.ip, hang if member.name == "pod-3" else reply(GOOD))
    async with source(pods, FakeClock(), timeout_s=2.0) as reader:
        reading = await reader.read(target(*members), 1000.0)
    assert uids(reading) == [member.uid for member in members if member.name != "pod-3"]
    assert reasons(reading.gaps) == [(WHOLE_PAGE, "pod-3", GapReason.TIMEOUT)]


async def test_c039_at_most_one_open_request_after_a_hundred_ticks(pods: FakePods) -> None:
    await pods.listen("127.0.1.1", hang)
    async with source(pods, FakeClock(), timeout_s=0.01) as reader:
        for _ in range(100):
            reading = await reader.read(target(pod(1)), 1000.0)
            assert reasons(reading.gaps) == [(WHOLE_PAGE, "pod-1", GapReason.TIMEOUT)]
    await pods.until_open("127.0.1.1", 1)


async def test_c039_no_second_scrape_while_one_is_under_way(pods: FakePods) -> None:
    await pods.listen("127.0.1.1", hang)
    async with source(pods, FakeClock(), timeout_s=0.5) as reader:
        readings = await asyncio.gather(*(reader.read(target(pod(1)), 1000.0) for _ in range(3)))
    assert pods.requests["127.0.1.1"] == 1
    details = [gap.detail for reading in readings for gap in reading.gaps]
    assert [detail for detail in details if "under way" in detail] == ["the last scrape is still under way"] * 2


async def test_cancelled_read_leaves_no_scrape_behind(pods: FakePods) -> None:
    await pods.listen("127.0.1.1", hang)
    async with source(pods, FakeClock()) as reader:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await reader.read(target(pod(1)), 1000.0)
        pods.answers["127.0.1.1"] = reply(GOOD)
        assert uids(await reader.read(target(pod(1)), 1005.0)) == ["uid-001"]


async def test_many_hanging_pods_hold_up_nobody(pods: FakePods) -> None:
    members = [pod(number) for number in range(1, 91)]
    for number, member in enumerate(members):
        await pods.listen(member.ip, hang if number < 70 else reply(GOOD))
    async with source(pods, FakeClock(), timeout_s=3.0) as reader:
        reading = await reader.read(target(*members), 1000.0)
    assert uids(reading) == [member.uid for member in members[70:]]
    assert Counter(gap.reason for gap in reading.gaps) == {GapReason.TIMEOUT: 70}


async def test_failed_scrape_keeps_the_last_rows_until_they_are_stale(pods: FakePods) -> None:
    await pods.listen("127.0.1.1", reply(GOOD))
    clock = FakeClock()
    seen = []
    async with source(pods, clock) as reader:
        for tick in range(6):
            if tick == 1:
                pods.answers["127.0.1.1"] = reply(b"", status="503 Service Unavailable")
            clock.at = 1000.0 + 5.0 * tick
            reading = await reader.read(target(pod(1)), clock.at)
            seen.append((read_at(reading), [gap.reason for gap in reading.gaps]))
    failed = [GapReason.HTTP_STATUS]
    assert seen == [([1000.0], []), *[([1000.0], failed)] * 3, *[([], failed)] * 2]


async def test_page_that_lost_its_families_is_not_covered_by_the_last_one(pods: FakePods) -> None:
    await pods.listen("127.0.1.1", reply(GOOD))
    async with source(pods, FakeClock()) as reader:
        await reader.read(target(pod(1)), 1000.0)
        pods.answers["127.0.1.1"] = reply(b"python_info 1\n")
        reading = await reader.read(target(pod(1)), 1005.0)
    assert uids(reading) == []
    assert reasons(reading.gaps) == [(WHOLE_PAGE, "pod-1", GapReason.NO_FAMILIES)]


async def test_vanished_pod_is_forgotten(pods: FakePods) -> None:
    for number in (1, 2):
        await pods.listen(f"127.0.1.{number}", reply(GOOD))
    async with source(pods, FakeClock()) as reader:
        assert uids(await reader.read(target(pod(1), pod(2)), 1000.0)) == ["uid-001", "uid-002"]
        assert uids(await reader.read(target(pod(2)), 1001.0)) == ["uid-002"]
        pods.answers["127.0.1.1"] = reply(b"", status="503 Service Unavailable")
        assert uids(await reader.read(target(pod(1), pod(2)), 1002.0)) == ["uid-002"]


def free_port(ip: str) -> int:
    with socket.socket() as probe:
        probe.bind((ip, 0))
        port: int = probe.getsockname()[1]
        return port


async def test_refusing_pod_is_tried_less_often_and_at_once_when_ready(pods: FakePods) -> None:
    pods.port = free_port("127.0.1.1")
    tried = []
    async with source(pods, FakeClock()) as reader:
        for tick in range(12):
            reading = await reader.read(target(pod(1, ready=False)), 1000.0 + tick)
            assert reasons(reading.gaps) == [(WHOLE_PAGE, "pod-1", GapReason.UNREACHABLE)]
            if "not tried" not in reading.gaps[0].detail:
                tried.append(tick)
        assert tried == [0, 1, 3, 7, 11]
        await pods.listen("127.0.1.1", reply(GOOD))
        reading = await reader.read(target(pod(1, ready=False)), 1012.0)
        assert "not tried" in reading.gaps[0].detail
        assert uids(await reader.read(target(pod(1, ready=True)), 1013.0)) == ["uid-001"]


async def test_a_ready_pod_that_refuses_is_tried_each_time_and_read_as_soon_as_it_is_back(pods: FakePods) -> None:
    pods.port = free_port("127.0.1.1")
    async with source(pods, FakeClock()) as reader:
        for tick in range(6):
            (gap,) = (await reader.read(target(pod(1)), 1000.0 + tick)).gaps
            assert "Connect" in gap.detail
        await pods.listen("127.0.1.1", reply(GOOD))
        assert uids(await reader.read(target(pod(1)), 1006.0)) == ["uid-001"]


async def test_each_pod_has_its_own_lasting_share_of_the_spread(pods: FakePods) -> None:
    members = [pod(number) for number in range(1, 21)]
    for member in members:
        await pods.listen(member.ip, reply(GOOD))
    clock = FakeClock()
    async with source(pods, clock, spread_s=4.0) as reader:
        await reader.read(target(*members), 1000.0)
        first = sorted(clock.slept_until)
        clock.slept_until.clear()
        await reader.read(target(*reversed(members)), 1005.0)
    assert sorted(at - 5.0 for at in clock.slept_until) == pytest.approx(first)
    assert all(1000.0 <= at < 1004.0 for at in first)
    assert len({round(at, 3) for at in first}) == 20


async def test_keys_are_the_same_object_from_tick_to_tick(pods: FakePods) -> None:
    members = [pod(number) for number in range(1, 4)]
    for member in members:
        await pods.listen(member.ip, reply(GOOD))
    async with source(pods, FakeClock()) as reader:
        first = (await reader.read(target(*members), 1000.0)).engines
        second = (await reader.read(target(*reversed(members)), 1005.0)).engines
    assert first is not None
    assert second is not None
    assert first.keys is second.keys


async def test_model_filter_comes_from_the_policy(pods: FakePods) -> None:
    await pods.listen("127.0.1.1", reply(GOOD))
    async with source(pods, FakeClock(), model_name="other") as reader:
        reading = await reader.read(target(pod(1)), 1000.0)
    assert reasons(reading.gaps) == [(WHOLE_PAGE, "pod-1", GapReason.FILTER_MATCHED_NOTHING)]
    assert "tiny" in reading.gaps[0].detail


async def test_session_of_the_caller_stays_open(pods: FakePods) -> None:
    await pods.listen("127.0.1.1", reply(GOOD))
    async with aiohttp.ClientSession() as session:
        reader = VllmSource(VllmSignals(port=pods.port), FakeClock(), session=session)
        assert uids(await reader.read(target(pod(1)), 1000.0)) == ["uid-001"]
        await reader.close()
        assert not session.closed


def has_ipv6_loopback() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError as error:
        return error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
    return True


@pytest.mark.skipif(not has_ipv6_loopback(), reason="no ::1 on this machine")
async def test_ipv6_address(pods: FakePods) -> None:
    await pods.listen("::1", reply(GOOD))
    async with source(pods, FakeClock()) as reader:
        reading = await reader.read(target(Pod(name="pod-6", uid="uid-006", ip="::1")), 1000.0)
    assert uids(reading) == ["uid-006"]
