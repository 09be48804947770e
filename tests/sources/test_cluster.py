"""The cache of a namespace against a fake API server, on a clock that only the tests move."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from kubernetes_asyncio.client import Configuration

from autoscaler.core.policy import TargetRef
from autoscaler.errors import TargetError
from autoscaler.sources.cluster import LAST_APPLIED, PAGE, PRUNE, ClusterCache, ClusterCaches, Pace, Watched
from autoscaler.sources.deployment import DeploymentTarget, target_status
from autoscaler.sources.kubernetes_api import KubernetesApi
from tests.fake_api import FakeApi, Fault, Json, deployment, hpa, manager, pending_pod, pod, replica_set

GONE = {"kind": "Status", "apiVersion": "v1", "code": 410, "reason": "Expired", "metadata": {}}


class ManualClock:
    """A clock that stands until it is moved; who sleeps is woken then.

    Attributes:
        dues: what was slept for, oldest first.
    """

    def __init__(self) -> None:
        self.at = 1_000.0
        self.dues: list[float] = []
        self._moved = asyncio.Event()

    def now(self) -> float:
        """Return epoch seconds."""
        return self.at

    async def sleep_until(self, at: float) -> None:
        """Return once it was moved that far."""
        self.dues.append(at)
        while self.at < at:
            await self._moved.wait()

    def move(self, seconds: float) -> None:
        """Move on, and wake the sleepers."""
        self.at += seconds
        self._moved.set()
        self._moved = asyncio.Event()


@pytest.fixture
async def fake() -> AsyncIterator[FakeApi]:
    async with FakeApi().serve() as server:
        yield server


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def api(fake: FakeApi, clock: ManualClock) -> AsyncIterator[KubernetesApi]:
    api = KubernetesApi(Configuration(host=fake.url), clock, timeout_s=5.0)
    yield api
    await api.close()


@asynccontextmanager
async def watching(
    api: KubernetesApi, clock: ManualClock, kind: str = "pods", *, optional: bool = False, watch_s: int = 600
) -> AsyncIterator[Watched]:
    """Return one kind that is kept up to date while the block runs."""
    watched = Watched(api, clock, kind, "serving", Pace(watch_s=watch_s), optional=optional)
    task = asyncio.create_task(watched.run())
    try:
        yield watched
    finally:
        task.cancel()
        await asyncio.wait([task])


async def until(true: Callable[[], bool]) -> None:
    """Return once something is so."""
    async with asyncio.timeout(20.0):
        while not true():  # noqa: ASYNC110 - what it waits for is inside the fake server
            await asyncio.sleep(0.005)


def line(kind: str, item: object) -> str:
    """Return one line of a watch."""
    return json.dumps({"type": kind, "object": item}) + "\n"


def bookmark(version: int) -> str:
    return line("BOOKMARK", {"kind": "Pod", "metadata": {"resourceVersion": str(version)}})


def versioned(item: Json, version: int, **metadata: object) -> Json:
    """Return an object as a watch tells it."""
    return item | {"metadata": item["metadata"] | {"resourceVersion": str(version)} | metadata}


def versions(fake: FakeApi) -> list[str]:
    """Return the versions that were watched from."""
    return [request.query["resourceVersion"] for request in fake.requests if request.verb == "watch"]


# --- 410 and other ends of a stream ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(Fault(status=410, body=GONE), id="status"),
        pytest.param(Fault(status=200, body=line("ERROR", GONE)), id="in the stream"),
        pytest.param(Fault(status=200, body=bookmark(1500) + line("ERROR", GONE)), id="after a bookmark"),
        pytest.param(Fault(status=200, body=line("ERROR", GONE) * 3), id="again and again"),
    ],
)
async def test_c096_gone_is_listed_again_once_a_second_and_watched_from_there(
    fake: FakeApi, api: KubernetesApi, clock: ManualClock, fault: Fault
) -> None:
    fake.pods = [pod("a")]
    fake.faults = {"watch pods": [fault, fault]}
    async with watching(api, clock) as watched:
        for round_ in (1, 2):
            await until(lambda count=round_: len(clock.dues) == count)  # type: ignore[misc]
            assert clock.dues[-1] == clock.at + 1.0
            assert fake.verbs() == ["list pods", "watch pods"] * round_
            assert watched.items.keys() == {"a", *(["b-1"] if round_ == 2 else [])}
            watched.check()
            fake.pods = [pod("a"), pod(f"b-{round_}")]
            clock.move(1.0)
        await until(lambda: bool(fake.watches))
        assert fake.verbs() == ["list pods", "watch pods"] * 3
        assert watched.items.keys() == {"a", "b-2"}
    first, second, third = map(int, versions(fake))
    assert first < second < third == fake.version


async def test_c096_a_fake_server_that_forgets_is_followed(
    fake: FakeApi, api: KubernetesApi, clock: ManualClock
) -> None:
    fake.forgotten = 10**6
    async with watching(api, clock) as watched:
        await until(lambda: len(clock.dues) == 1)
        assert watched.trouble is not None
        assert watched.trouble.reason == "expired"
        fake.forgotten = 0
        clock.move(1.0)
        await until(lambda: watched.trouble is None)


async def test_c096_a_bookmark_only_moves_the_version(fake: FakeApi, api: KubernetesApi, clock: ManualClock) -> None:
    fake.pods = [pod("a")]
    fake.faults = {"watch pods": [Fault(status=200, body=bookmark(1500) + bookmark(1600))]}
    async with watching(api, clock) as watched:
        await until(lambda: len(clock.dues) == 1)
        changes = watched.changes
        clock.move(1.0)
        await until(lambda: bool(fake.watches))
        assert watched.items.keys() == {"a"}
        assert watched.changes == changes
    assert fake.verbs() == ["list pods", "watch pods", "watch pods"]
    assert versions(fake)[1] == "1600"


BAD_STREAMS = [
    pytest.param(Fault(status=200, body="<html>\n"), "bad_body", id="a proxy's page"),
    pytest.param(Fault(status=200, body=line("ADDED", None)), "bad_body", id="no object"),
    pytest.param(Fault(status=200, body=line("ADDED", pod("x"))), "bad_body", id="no version"),
    pytest.param(Fault(status=200, body=line("RENAMED", versioned(pod("x"), 7))), "bad_body", id="unknown type"),
    pytest.param(
        Fault(status=200, body=line("ADDED", {"metadata": {"resourceVersion": "7"}})), "bad_body", id="no name"
    ),
    pytest.param(Fault(status=200, body=line("ERROR", {"code": 500})), "unreachable", id="an error of the server"),
    pytest.param(Fault(status=200, body=""), "unreachable", id="nothing said"),
    pytest.param(Fault(cut=True, body=bookmark(1500)), "unreachable", id="cut"),
    pytest.param(Fault(status=503), "unreachable", id="refused"),
    pytest.param(Fault(status=429), "throttled", id="throttled"),
]


@pytest.mark.parametrize(("fault", "reason"), BAD_STREAMS)
async def test_after_a_stream_that_ends_badly_everything_is_listed_again(
    fake: FakeApi, api: KubernetesApi, clock: ManualClock, fault: Fault, reason: str
) -> None:
    fake.pods = [pod("a")]
    fake.faults = {"watch pods": [fault]}
    async with watching(api, clock) as watched:
        await until(lambda: len(clock.dues) == 1)
        assert watched.trouble is not None
        assert watched.trouble.reason == reason
        assert watched.items.keys() == {"a"}
        watched.check()  # a moment ago it was listed
        clock.move(1.0)
        await until(lambda: watched.trouble is None)
        assert fake.verbs() == ["list pods", "watch pods"] * 2


async def test_a_stream_that_ends_well_is_opened_again_where_it_ended(
    fake: FakeApi, api: KubernetesApi, clock: ManualClock
) -> None:
    async with watching(api, clock, watch_s=1) as watched:
        await until(lambda: len(clock.dues) == 1)  # after its bookmark
        fake.pods = [pod("a")]
        clock.move(1.0)
        await until(lambda: watched.items.keys() == {"a"})
    assert fake.verbs() == ["list pods", "watch pods", "watch pods"]
    assert versions(fake)[0] == versions(fake)[1]


async def test_retries_come_later_and_later_and_never_at_the_same_time(
    fake: FakeApi, api: KubernetesApi, clock: ManualClock
) -> None:
    fake.faults = {"list pods": [Fault(status=503)] * 20}
    pauses = []
    async with watching(api, clock):
        for number in range(20):
            await until(lambda count=number: len(clock.dues) == count + 1)  # type: ignore[misc]
            pauses.append(clock.dues[-1] - clock.at)
            clock.move(pauses[-1])
        await until(lambda: bool(fake.watches))
    longest = [min(2.0, 0.5 * 2.0**number) for number in range(20)]
    assert all(
        max(1.0, at_most / 2) <= pause <= max(1.0, at_most) for pause, at_most in zip(pauses, longest, strict=True)
    )
    assert len(set(pauses[4:])) > 8


async def test_c092_a_wish_for_patience_is_granted(fake: FakeApi, api: KubernetesApi, clock: ManualClock) -> None:
    fake.faults = {"list pods": [Fault(status=429, headers={"Retry-After": "7"})]}
    async with watching(api, clock) as watched:
        for number, pause_s in ((1, 0.0), (2, 1.0), (3, 2.0), (4, 2.0), (4, 1.9)):
            clock.move(pause_s)
            await until(lambda count=number: len(clock.dues) >= count)  # type: ignore[misc]
            with pytest.raises(TargetError) as caught:
                watched.check()
            assert (caught.value.reason, caught.value.retry_after_s) == ("throttled", None)
        assert fake.verbs() == ["list pods"]
        clock.move(2.0)
        await until(lambda: watched.trouble is None)
        watched.check()


async def test_c094_a_rotated_token_is_taken_up_and_a_refused_one_is_said(
    fake: FakeApi, clock: ManualClock, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("old")
    fake.tokens = {"old"}
    api = KubernetesApi(Configuration(host=fake.url), clock, token_file=token, timeout_s=5.0)
    async with watching(api, clock, watch_s=1) as watched:
        await until(lambda: len(clock.dues) == 1)
        fake.tokens = {"new"}
        clock.move(1.0)
        await until(lambda: watched.trouble is not None)
        with pytest.raises(TargetError) as caught:
            watched.check()
        assert caught.value.reason == "unauthorized"
        token.write_text("new")
        clock.move(5.0)
        await until(lambda: watched.trouble is None)
        watched.check()
    await api.close()
    assert [request.token for request in fake.requests] == ["old", "old", "old", "old", "new", "new"]


# --- how long a view is believed ------------------------------------------------------------------------------------


async def test_a_silent_server_is_believed_for_half_a_minute(
    fake: FakeApi, api: KubernetesApi, clock: ManualClock
) -> None:
    fake.pods = [pod("a")]
    async with watching(api, clock) as watched:
        await until(lambda: bool(fake.watches))
        clock.move(30.0)
        watched.check()
        clock.move(0.5)
        with pytest.raises(TargetError) as caught:
            watched.check()
        assert (caught.value.reason, caught.value.detail) == ("unreachable", "pods: no word for 30 s; silence")
        fake.pods = [pod("a"), pod("b")]
        await until(lambda: len(watched.items) == 2)
        watched.check()


@pytest.mark.parametrize(
    "said",
    [pytest.param(True, id="with a bookmark"), pytest.param(False, id="with nothing said")],
)
async def test_the_end_of_a_stream_confirms_a_view_in_which_nothing_happens(
    fake: FakeApi, api: KubernetesApi, clock: ManualClock, said: bool
) -> None:
    fake.bookmarks = said
    async with watching(api, clock, watch_s=1) as watched:
        await until(lambda: bool(fake.watches))
        clock.move(40.0)
        await until(lambda: len(clock.dues) == 1)
        watched.check()
        clock.move(20.0)
        await until(lambda: bool(fake.watches))
    assert fake.verbs() == ["list pods", "watch pods", "watch pods"]


async def test_a_server_that_is_gone_is_said_after_ten_seconds_with_its_own_words(
    fake: FakeApi, api: KubernetesApi, clock: ManualClock
) -> None:
    async with watching(api, clock, watch_s=1) as watched:
        await until(lambda: bool(fake.watches))
        fake.faults = {"watch pods": [Fault(cut=True)], "list pods": [Fault(status=503)] * 5}
        clock.move(20.0)
        for number, pause_s in ((2, 0.0), (3, 1.0), (4, 2.0), (5, 2.0), (6, 2.0), (7, 2.0)):
            clock.move(pause_s)
            await until(lambda count=number: len(clock.dues) == count)  # type: ignore[misc]
            watched.check()
        clock.move(1.1)
        with pytest.raises(TargetError, match=r"^unreachable: pods: no word for 10 s; GET .*: 503") as caught:
            watched.check()
        assert caught.value.retry_after_s is None
        clock.move(2.0)
        await until(lambda: watched.trouble is None)
        watched.check()


@pytest.mark.parametrize("verb", ["list", "watch"])
@pytest.mark.parametrize(("status", "reason"), [(403, "forbidden"), (404, "target_not_found")])
async def test_a_refusal_is_said_at_once(
    fake: FakeApi, api: KubernetesApi, clock: ManualClock, verb: str, status: int, reason: str
) -> None:
    fake.faults = {f"{verb} pods": [Fault(status=status)]}
    async with watching(api, clock) as watched:
        await watched.attempted.wait()
        with pytest.raises(TargetError) as caught:
            watched.check()
        assert caught.value.reason == reason


async def test_what_may_stay_unseen_is_asked_for_now_and_then(
    fake: FakeApi, api: KubernetesApi, clock: ManualClock
) -> None:
    kind = "horizontalpodautoscalers"
    fake.hpas = [hpa("h")]
    async with watching(api, clock, kind, optional=True, watch_s=1) as watched:
        await until(lambda: len(clock.dues) == 1)
        assert watched.items.keys() == {"h"}
        fake.faults = {f"watch {kind}": [Fault(status=403)], f"list {kind}": [Fault(status=403)]}
        for number in (2, 3):
            clock.move(30.0)
            await until(lambda count=number: len(clock.dues) == count)  # type: ignore[misc]
            assert clock.dues[-1] == clock.at + 30.0
            assert (watched.hidden, watched.items) == (True, {})
            watched.check()
        clock.move(30.0)
        await until(lambda: not watched.hidden)
        assert watched.items.keys() == {"h"}


# --- what is kept ---------------------------------------------------------------------------------------------------


async def test_a_long_list_is_read_in_pages(fake: FakeApi, api: KubernetesApi, clock: ManualClock) -> None:
    fake.pods = [pod(f"p-{number}") for number in range(2 * PAGE + 1)]
    async with watching(api, clock) as watched:
        await until(lambda: bool(fake.watches))
        assert len(watched.items) == 2 * PAGE + 1
    assert fake.verbs() == ["list pods"] * 3 + ["watch pods"]
    assert [request.query.get("continue") for request in fake.requests[:3]] == [None, str(PAGE), str(2 * PAGE)]


async def test_a_deletion_is_of_that_very_object(fake: FakeApi, api: KubernetesApi, clock: ManualClock) -> None:
    fake.pods = [pod("a"), pod("b")]
    told = [
        line("DELETED", versioned(pod("a"), 1501, uid="an earlier one")),
        line("DELETED", versioned(pod("b"), 1502)),
        line("DELETED", versioned(pod("c"), 1503)),
        line("MODIFIED", versioned(pod("d"), 1504)),
    ]
    fake.faults = {"watch pods": [Fault(silent=True, body="".join(told))]}
    async with watching(api, clock) as watched:
        await until(lambda: "d" in watched.items)
        assert watched.items.keys() == {"a", "d"}


@pytest.mark.parametrize(
    ("metadata", "replicas"),
    [
        pytest.param({"generation": 2}, 2, id="from before what is known"),
        pytest.param({"generation": 3}, 9, id="of the same generation"),
        pytest.param({"generation": 4}, 9, id="later"),
        pytest.param({"generation": 1, "uid": "another"}, 9, id="made anew"),
        pytest.param({"generation": None}, 2, id="without a generation"),
    ],
)
async def test_what_is_known_does_not_become_older(
    fake: FakeApi, api: KubernetesApi, clock: ManualClock, metadata: Json, replicas: int
) -> None:
    told = versioned(deployment(replicas=9), 1500, **metadata)
    fake.faults = {"watch deployments": [Fault(silent=True, body=line("MODIFIED", told))]}
    async with watching(api, clock, "deployments") as watched:
        await until(lambda: watched.changes == 2)
        assert watched.items["chat"]["spec"]["replicas"] == replicas


async def test_a_list_that_was_asked_for_before_a_write_does_not_undo_it(
    fake: FakeApi, api: KubernetesApi, clock: ManualClock
) -> None:
    assert fake.deployment is not None
    async with watching(api, clock, "deployments") as watched:
        await until(lambda: bool(fake.watches))
        fake.deployment["metadata"]["generation"] = 4
        fake.deployment["spec"]["replicas"] = 5
        await watched.refresh("chat")
        assert watched.items["chat"]["spec"]["replicas"] == 5
        old = {"metadata": {"resourceVersion": "1001"}, "items": [deployment(replicas=2)]}
        fake.faults = {"list deployments": [Fault(status=200, body=old)]}
        await watched._list()
        assert watched.items["chat"]["spec"]["replicas"] == 5


def bloated(item: Json) -> Json:
    """Return an object with what the API adds to it."""
    metadata = item["metadata"] | {
        "managedFields": [{"manager": "kubelet", "fieldsV1": {"f:status": {}}}],
        "annotations": item["metadata"].get("annotations", {}) | {LAST_APPLIED: "{}", "note": "kept"},
    }
    spec = item["spec"] | {"template": {"spec": {"containers": []}}, "volumes": [{"name": "cache"}]}
    return item | {"metadata": metadata, "spec": spec}


def test_what_is_kept_makes_the_same_status_and_is_little() -> None:
    pods = [bloated(one) for one in (pod("a", args=["--max-num-seqs", "64"], restarts=2), pending_pod("b"))]
    pods[0]["metadata"]["annotations"]["controller.kubernetes.io/pod-deletion-cost"] = "-1"
    sets = [bloated(one) for one in (replica_set("chat-1"), replica_set("chat-0", revision=0, wanted=1))]
    hpas = [bloated(hpa("h"))]
    target = bloated(deployment())
    target["metadata"]["managedFields"].append(manager("helm", 50.0))
    kept = PRUNE["deployments"](target)
    pruned = [
        [PRUNE[kind](one) for one in items]
        for kind, items in (("replicasets", sets), ("pods", pods), ("horizontalpodautoscalers", hpas))
    ]
    assert target_status(kept, *pruned) == target_status(target, sets, pods, hpas)
    (writer,) = kept["metadata"]["managedFields"]
    assert writer["manager"] == "helm"
    assert writer["fieldsV1"] == {"f:spec": {"f:replicas": {}}}
    assert kept["metadata"]["annotations"] == {"deployment.kubernetes.io/revision": "1", "note": "kept"}
    assert kept["spec"] == target["spec"]
    text = json.dumps(pruned)
    assert not any(word in text for word in ("managedFields", "volumes", 'template"', "note"))


@pytest.mark.parametrize("kind", sorted(PRUNE))
def test_an_odd_object_breaks_nothing(kind: str) -> None:
    odds: list[Json] = [{}, {"metadata": None, "spec": [], "status": "x"}, {"spec": {"containers": [None, 1]}}]
    assert all(isinstance(PRUNE[kind](odd), dict) for odd in odds)


# --- one for all ----------------------------------------------------------------------------------------------------


async def test_targets_of_a_namespace_share_what_is_watched(
    fake: FakeApi, api: KubernetesApi, clock: ManualClock
) -> None:
    caches = ClusterCaches(api, clock)
    targets = [DeploymentTarget(caches, TargetRef(deployment="chat", namespace="serving")) for _ in range(5)]
    await asyncio.gather(*(target.read() for target in targets))
    assert len(fake.requests) == 8
    for target in targets[:-1]:
        await target.close()
        await target.close()
    assert len(fake.watches) == 4
    await targets[-1].read()
    assert len(fake.requests) == 8
    await targets[-1].close()
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("watch ")]
    await until(lambda: not fake.watches)
    assert (await targets[0].read()).current_replicas == 2
    assert len(fake.requests) == 16
    await targets[0].close()


async def test_a_bug_in_a_stream_is_no_silence(
    fake: FakeApi, api: KubernetesApi, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stumble(_self: Watched, _event: Json) -> str:
        raise KeyError("mine")

    cache = ClusterCache(api, clock, "serving", Pace())
    await cache.ready()
    monkeypatch.setattr(Watched, "_apply", stumble)
    fake.pods = [pod("a")]
    with pytest.raises(RuntimeError, match="watch serving/pods has ended") as caught:
        await until_raised(cache)
    assert isinstance(caught.value.__cause__, KeyError)
    await cache.close()


async def until_raised(cache: ClusterCache) -> None:
    """Ask until there is an error."""
    async with asyncio.timeout(20.0):
        while True:
            await cache.ready()
            await asyncio.sleep(0.005)
