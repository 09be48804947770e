"""The Lease against a real API server: electors in this process, and daemons that are killed, frozen and asked to end.

Nobody here looks at a clock but to see that a takeover keeps its promise: the lease's length and two seconds.
"""

import asyncio
import json
import secrets
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from autoscaler.clock import SystemClock
from autoscaler.errors import TargetError
from autoscaler.lease import MAX_BYTES, MERGE_PATCH, PREFIX, RELEASED_S, RIGHTS, Elector, Memories, micro_time
from autoscaler.sources.kubernetes_api import KubernetesApi
from autoscaler.testbed.api import ApiError, Json
from tests.cluster.daemon import Daemon, credential_of, running_daemon
from tests.cluster.manifests import Place, Right, deployment, eventually, grant, is_ready, policy
from tests.cluster.proxy import running_proxy
from tests.cluster.site import DEPLOYED

LEASE_S, RENEW_S, RETRY_S = 6.0, 4.0, 1.0
SPARE_S = 2.0
SAMPLE_S = 0.02
DAEMON_LEASE_S = 6.0
SCALE_WRITE = ("apps", "deployments/scale", "patch")
BUSY = {"rps": 2, "running": 64, "kv": 0.9, "waiting": 120, "queue": 6, "ttft": 6}
CALM = {"rps": 2, "running": 1, "kv": 0.1, "waiting": 0, "queue": 0, "ttft": 0.1}


def path_of(place: Place) -> str:
    return f"/apis/coordination.k8s.io/v1/namespaces/{place.namespace}/leases/autoscaler"


async def release(place: Place) -> None:
    """Make a Lease as a leader leaves it that has ended well, so that the first need not wait."""
    spec = {"holderIdentity": "", "leaseDurationSeconds": RELEASED_S}
    manifest = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": "autoscaler"}}
    await place.api.request("POST", path_of(place).rpartition("/")[0], {**manifest, "spec": spec})


@dataclass
class Candidate:
    """An elector that runs in this process, with what it was told and told of."""

    api: KubernetesApi
    elector: Elector
    memories: Memories
    troubles: list[TargetError]
    task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start it."""
        self.task = asyncio.create_task(self.elector.run())

    async def kill(self) -> None:
        """End it without giving the Lease up."""
        if self.task is not None:
            self.task.cancel()
            with suppress(asyncio.CancelledError):
                await self.task
            self.task = None

    @property
    def leading(self) -> bool:
        """Whether it leads, and lives."""
        return self.task is not None and self.elector.leading()


@dataclass
class Ear:
    """`lease.Listener` that remembers."""

    troubles: list[TargetError] = field(default_factory=list)

    def leads(self, leading: bool) -> None:
        """Need nothing: the elector is asked itself."""

    def trouble(self, error: TargetError) -> None:
        """Remember it."""
        self.troubles.append(error)


class Electorate:
    """Candidates for one Lease under one account, watched all the time: never do two lead."""

    def __init__(self, place: Place, kubeconfig: Path) -> None:
        self.place = place
        self._kubeconfig = kubeconfig
        self.candidates: list[Candidate] = []
        self.samples = 0

    async def add(self) -> Candidate:
        """Return a candidate that runs."""
        clock, ear = SystemClock(), Ear()
        api = await KubernetesApi.connect(clock, kubeconfig=str(self._kubeconfig), environ={}, timeout_s=RETRY_S)
        memories = Memories(damaged=lambda _policy, _problem: None, recalled=lambda _policy, _at, _memory: None)
        elector = Elector(
            api,
            clock,
            namespace=self.place.namespace,
            name="autoscaler",
            identity=secrets.token_hex(4),
            memories=memories,
            listener=ear,
            lease_s=LEASE_S,
            renew_s=RENEW_S,
            retry_s=RETRY_S,
        )
        candidate = Candidate(api, elector, memories, ear.troubles)
        self.candidates.append(candidate)
        candidate.start()
        return candidate

    async def watch(self) -> None:
        """Look again and again, for ever."""
        while True:
            assert sum(one.leading for one in self.candidates) <= 1
            self.samples += 1
            await asyncio.sleep(SAMPLE_S)

    async def until(self, true: Callable[[], bool], what: str, limit_s: float = 30.0) -> float:
        """Return after how many seconds something was so."""
        began = time.monotonic()

        async def is_so() -> bool:
            return true()

        await eventually(is_so, what, limit_s)
        return time.monotonic() - began


@asynccontextmanager
async def electorate(place: Place, folder: Path, *rights: Right) -> AsyncIterator[Electorate]:
    """Give candidates that are watched, under an account with these rights."""
    await grant(place, rights or RIGHTS)
    token = await place.plane.token_for(place.namespace, "subject")
    one = Electorate(place, place.plane.kubeconfig_for(token, folder / "account.kubeconfig"))
    watch = asyncio.create_task(one.watch())
    try:
        yield one
        assert not watch.done(), watch.exception()
    finally:
        watch.cancel()
        for candidate in one.candidates:
            await candidate.kill()
            await candidate.api.close()


# --- electors -------------------------------------------------------------------------------------------------------


async def test_a_killed_one_is_succeeded_and_one_that_ends_hands_over(place: Place, tmp_path: Path) -> None:
    async with electorate(place, tmp_path) as voters:
        await release(place)
        first, second = await voters.add(), await voters.add()
        await voters.until(lambda: first.leading or second.leading, "leader")
        leader, other = (first, second) if first.leading else (second, first)
        await leader.kill()
        assert await voters.until(lambda: other.leading, "successor") <= LEASE_S + SPARE_S
        leader.start()
        await other.kill()
        await other.elector.release()
        assert (await place.api.get(path_of(place)))["spec"]["holderIdentity"] == ""
        await voters.until(lambda: leader.leading, "the first again")
        lease = await place.api.get(path_of(place))
        assert lease["spec"]["leaseTransitions"] == 2
        assert first.troubles == second.troubles == []
        assert voters.samples


@pytest.mark.usefixtures("outage")
async def test_while_the_api_server_is_frozen_nobody_leads_and_after_it_one(place: Place, tmp_path: Path) -> None:
    plane = place.plane
    async with electorate(place, tmp_path) as voters:
        await release(place)
        await voters.add()
        await voters.add()
        await voters.until(lambda: any(one.leading for one in voters.candidates), "leader")
        plane.api_server.send(signal.SIGSTOP)
        ended_s = await voters.until(lambda: not any(one.leading for one in voters.candidates), "end of leading")
        assert ended_s <= RENEW_S + SPARE_S
        await asyncio.sleep(LEASE_S)
        assert not any(one.leading for one in voters.candidates)
        plane.api_server.send(signal.SIGCONT)
        await plane.ready()
        await voters.until(lambda: any(one.leading for one in voters.candidates), "leader again")
        assert {error.reason for one in voters.candidates for error in one.troubles} == {"unreachable"}


async def test_a_lease_that_is_deleted_is_made_anew_by_its_leader(place: Place, tmp_path: Path) -> None:
    async with electorate(place, tmp_path) as voters:
        await release(place)
        first = await voters.add()
        await voters.until(lambda: first.leading, "leader")
        await voters.add()
        old = (await place.api.get(path_of(place)))["metadata"]["uid"]
        await place.api.request("DELETE", path_of(place))

        async def is_anew() -> bool:
            with suppress(ApiError):
                lease = await place.api.get(path_of(place))
                return bool(lease["spec"].get("holderIdentity") and lease["metadata"]["uid"] != old)
            return False

        await eventually(is_anew, "a Lease with a holder")
        assert first.leading


@pytest.mark.parametrize("missing", sorted(RIGHTS))
async def test_a_missing_right_is_said(place: Place, tmp_path: Path, missing: Right) -> None:
    async with electorate(place, tmp_path, *(RIGHTS - {missing})) as voters:
        if missing[2] == "patch":
            await release(place)
        one = await voters.add()
        await voters.until(lambda: bool(one.troubles), "trouble")
        assert one.troubles[0].reason == "forbidden"
        assert one.troubles[0].detail.startswith({"get": "GET", "create": "POST", "patch": "PATCH"}[missing[2]])
        assert not one.leading


async def test_a_patch_of_an_older_version_is_a_conflict_and_changes_nothing(place: Place) -> None:
    await release(place)
    old = (await place.api.get(path_of(place)))["metadata"]["resourceVersion"]
    body: Json = {"metadata": {"resourceVersion": old}, "spec": {"holderIdentity": "a", "renewTime": micro_time(1.25)}}
    answer = await place.api.request("PATCH", path_of(place), body, content_type=MERGE_PATCH)
    assert answer["spec"]["renewTime"] == "1970-01-01T00:00:01.250000Z"
    body["spec"]["holderIdentity"] = "b"
    with pytest.raises(ApiError) as raised:
        await place.api.request("PATCH", path_of(place), body, content_type=MERGE_PATCH)
    assert raised.value.status == 409
    assert (await place.api.get(path_of(place)))["spec"]["holderIdentity"] == "a"


async def test_as_much_as_is_ever_saved_is_taken(place: Place) -> None:
    await release(place)
    text = "x" * (MAX_BYTES // 2 - 100)
    annotations = {PREFIX + "a" * 63: text, f"{PREFIX}{'a' * 40}-{'0' * 16}": text}
    body = {"metadata": {"annotations": annotations}}
    answer = await place.api.request("PATCH", path_of(place), body, content_type=MERGE_PATCH)
    assert answer["metadata"]["annotations"] == annotations


# --- daemons --------------------------------------------------------------------------------------------------------


@dataclass
class Fleet:
    """Daemons that share a Lease."""

    place: Place
    more: str
    start: Callable[[], Any]

    async def until(self, true: Callable[[], bool], what: str) -> None:
        """Return once something is so."""

        async def is_so() -> bool:
            return true()

        await eventually(is_so, what)

    async def scalings(self) -> list[tuple[str, int]]:
        """Return the scale writes that were asked for by the daemons' account, each with its answer's code."""
        user = f"system:serviceaccount:{self.place.namespace}:subject"
        return [
            (event.name, event.code)
            for event in await self.place.plane.audit()
            if event.user == user and event.right == SCALE_WRITE
        ]


@pytest.fixture
async def fleet(place: Place, tmp_path: Path) -> AsyncIterator[Fleet]:
    """Return daemons to be started, over a Deployment whose one pod is overrun: each tick wants more replicas."""
    await grant(place, DEPLOYED)
    token = await place.plane.token_for(place.namespace, "subject")
    kubeconfig = place.plane.kubeconfig_for(token, tmp_path / "account.kubeconfig")
    await release(place)
    await place.create(deployment(replicas=1, fake={"cold-start-seconds": 1}))
    await place.tell(await place.until_ready(1), **BUSY)
    more = "  cooldown: 600s\n  scaleUp: {maxStep: 1, stabilization: 0s}\n  emergency: {enabled: false}\n"
    rules = policy(tmp_path, place.plane, place.namespace, replicas="{min: 1, max: 4}", more=more)
    async with AsyncExitStack() as stack:

        async def start() -> Daemon:
            words = ("--lease", f"{place.namespace}/autoscaler", "--lease-duration", f"{DAEMON_LEASE_S:g}s")
            return await stack.enter_async_context(running_daemon(kubeconfig, rules, *words))

        yield Fleet(place, more, start)


async def leader_gauge(url: str) -> float:
    """Return `autoscaler_leader` of a daemon."""
    async with httpx.AsyncClient() as client:
        page = (await client.get(f"{url}/metrics")).text
    (line,) = [line for line in page.splitlines() if line.startswith("autoscaler_leader{")]
    return float(line.rpartition(" ")[2])


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
async def test_c106_the_next_leader_keeps_the_cooldown(fleet: Fleet, how: signal.Signals) -> None:
    first = await fleet.start()
    await first.until("leading")
    done = await first.until("decision", outcome="applied")
    assert (done["action"], done["desired_replicas"]) == ("scale_up", 2)
    await first.until("decision", reason="held_cooldown")
    await fleet.place.tell(await fleet.place.until_ready(2), **BUSY)
    second = await fleet.start()
    url = (await second.until("started"))["listen"]
    wished = await second.until("decision", action="scale_up")
    assert wished["outcome"] == "standby"  # it knows of no cooldown, and does not write either
    async with httpx.AsyncClient() as client:
        assert (await client.get(f"{url}/readyz")).status_code == 200
    assert await leader_gauge(url) == 0.0
    first._process.send_signal(how)
    began = time.monotonic()
    await second.until("leading")
    assert time.monotonic() - began <= DAEMON_LEASE_S + SPARE_S
    assert await leader_gauge(url) == 1.0
    await second.until("decision", reason="held_cooldown", outcome="unchanged")
    if how is signal.SIGSTOP:
        first._process.send_signal(signal.SIGCONT)
        await first.until("standing_by")
        await first.until("decision")
    third = await fleet.start()
    await third.until("decision", outcome="standby")
    assert await second.end(signal.SIGTERM) == 0
    handed_over = next(line for line in reversed(second.seen) if line["event"] == "standing_by")
    assert handed_over["lease"] == f"{fleet.place.namespace}/autoscaler"
    survivors = [third] if how is signal.SIGKILL else [first, third]
    leading = [asyncio.create_task(one.until("leading")) for one in survivors]
    await asyncio.wait(leading, return_when=asyncio.FIRST_COMPLETED)
    lease = await fleet.place.api.get(path_of(fleet.place))
    assert lease["spec"]["leaseTransitions"] == 2
    assert await fleet.scalings() == [("chat", 200)]
    for task in leading:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@pytest.mark.parametrize("successor", ["a standby", "a new process"])
async def test_c106_a_step_that_the_leader_died_before_saving_holds_its_cooldown(
    fleet: Fleet, tmp_path: Path, successor: str
) -> None:
    place, ours = fleet.place, tmp_path / "account.kubeconfig"
    words = (tmp_path / "chat.yaml", "--lease", f"{place.namespace}/autoscaler", "--lease-duration", "5s")
    pods = await place.list_pods()
    await place.tell(pods, **CALM)
    async with running_proxy(place.plane) as proxy, AsyncExitStack() as stack:
        token = await place.plane.token_for(place.namespace, "subject")
        behind = proxy.kubeconfig_for(token, tmp_path / "behind.kubeconfig")
        leader = await stack.enter_async_context(running_daemon(behind, *words))
        await leader.until("leading")
        second = None
        if successor == "a standby":
            second = await stack.enter_async_context(running_daemon(ours, *words))
            await second.until("decision")
        before = await saved_in(place)
        # The answer is late enough for the Lease to get out of reach before there is anything to save.
        with proxy.rule(method="PATCH", path="/scale$", late_s=1.0) as late:
            await place.tell(pods, **BUSY)
            await fleet.until(lambda: late.hits > 0, "step")
            with proxy.rule(method="PATCH", path="/leases/", drop="before"):
                done = await leader.until("decision", outcome="applied")
                assert (done["action"], done["desired_replicas"]) == ("scale_up", 2)
                assert await leader.end(signal.SIGKILL) == -signal.SIGKILL
        assert await saved_in(place) == before == (None, None, 1)
        if second is None:
            second = await stack.enter_async_context(running_daemon(ours, *words))
        await place.tell(await place.until_ready(2), **BUSY)
        await second.until("leading")
        await second.until("decision", reason="held_cooldown", outcome="unchanged")
    assert await fleet.scalings() == [("chat", 200)]


async def saved_in(place: Place) -> tuple[float | None, float | None, int | None]:
    """Return what the Lease says of the target: its last steps, and its replicas."""

    async def is_there() -> bool:
        return f"{PREFIX}chat" in ((await place.api.get(path_of(place)))["metadata"].get("annotations") or {})

    await eventually(is_there, "memory in the Lease")
    content = json.loads((await place.api.get(path_of(place)))["metadata"]["annotations"][f"{PREFIX}chat"])
    return content.get("last_up_at"), content.get("last_down_at"), content["owners"]["replicas"]


async def test_daemons_share_targets_by_label_with_a_lease_each(fleet: Fleet, tmp_path: Path) -> None:
    place = fleet.place
    await place.create(deployment("code", replicas=1, fake={"cold-start-seconds": 1}))
    pods = await place.until(lambda pods: len(pods) == 2 and all(map(is_ready, pods)), "a pod of each target")
    await place.tell(pods, **BUSY)
    policies = tmp_path / "policies"
    policies.mkdir()
    for name, team in (("chat", "a"), ("code", "b")):
        rules = {"replicas": "{min: 1, max: 4}", "more": fleet.more, "labels": f"{{team: {team}}}"}
        policy(policies, place.plane, place.namespace, name=name, **rules)
    writers: dict[str, str] = {}
    async with AsyncExitStack() as stack:
        daemons = []
        for name, selector in (("chat", "team=a"), ("code", "team notin (a)")):
            token = await place.plane.token_for(place.namespace, "subject")
            kubeconfig = place.plane.kubeconfig_for(token, tmp_path / f"{name}.kubeconfig")
            words = ("--selector", selector, "--lease", f"{place.namespace}/{name}", "--lease-duration", "5s")
            daemons.append(await stack.enter_async_context(running_daemon(kubeconfig, policies, *words)))
            writers[name] = credential_of(token)
        for daemon, name in zip(daemons, writers, strict=True):
            assert (await daemon.until("started"))["policies"] == [name]
            done = await daemon.until("decision", outcome="applied")
            assert (done["policy"], done["desired_replicas"]) == (name, 2)
            assert {line["policy"] for line in daemon.of("decision")} == {name}
        leases = await place.api.items(path_of(place).rpartition("/")[0])
        holders = {lease["metadata"]["name"]: lease["spec"]["holderIdentity"] for lease in leases}
    assert holders["chat"]
    assert holders["code"]
    assert holders["chat"] != holders["code"]
    steps = [event for event in await place.plane.audit() if event.namespace == place.namespace]
    assert {(one.name, one.credential) for one in steps if one.right == SCALE_WRITE} == set(writers.items())


async def test_a_dry_run_needs_no_lease_and_leaves_it_alone(fleet: Fleet, tmp_path: Path) -> None:
    place = fleet.place
    await place.api.request("DELETE", path_of(place))
    arguments = (tmp_path / "account.kubeconfig", tmp_path / "chat.yaml", "--dry-run", "--lease")
    async with running_daemon(*arguments, f"{place.namespace}/autoscaler") as daemon:
        decision = await daemon.until("decision", action="scale_up")
        assert decision["outcome"] == "simulated"
        assert await daemon.end(signal.SIGTERM) == 0
    with pytest.raises(ApiError) as raised:
        await place.api.get(path_of(place))
    assert raised.value.status == 404
