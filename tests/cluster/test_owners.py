"""What others do to a Deployment that a daemon scales, on a real API server: they write its replicas, pause it, let a
rollout fail, set a quota, or give its pods no time to end.
"""

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from autoscaler.testbed.api import MERGE, STRATEGIC, Json
from autoscaler.testbed.plane import AuditEvent
from tests.cluster.daemon import Daemon, running_daemon, total
from tests.cluster.manifests import Place, address_of, condition, deployment, eventually, is_ready, policy
from tests.cluster.site import SCALE_WRITE, Site

# Twenty requests in each queue are a score of 1; nothing else counts, and a second's calm is enough to shrink.
EAGER = """\
  sizing: score
  score: {weights: {memory: 0, backlog: 1, latency: 0}, backlog: {wait: null}, warmUp: 0s}
  scaleUp: {threshold: 0.7, maxStep: 1, stabilization: 0s, turn: 0s}
  scaleDown: {threshold: 0.4, stabilization: 1s, horizonFactor: 0, turn: 0s, drain: 300s, requireDrain: false}
  emergency: {enabled: false}
  cooldown: 0s
"""
CALM, STEADY, BUSY = 0, 11, 20
SURGE = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
REPLACE = ("replace", "/spec/replicas")
GITOPS = "argocd-controller"


@dataclass
class Load:
    """How many requests wait in each queue, from the next round on."""

    waiting: int = STEADY

    async def spread(self, place: Place) -> None:
        """Tell all pods that are ready, again and again, for ever."""
        async with httpx.AsyncClient() as client:
            while True:
                for pod in filter(is_ready, await place.list_pods()):
                    load = {"rps": 1, "running": 8, "kv": 0.3, "waiting": self.waiting}
                    with suppress(httpx.TransportError):  # gone meanwhile
                        await client.post(f"http://{address_of(place.plane, pod)}/fake", json=load)
                await asyncio.sleep(0.1)


@asynccontextmanager
async def during(work: Any) -> AsyncIterator[None]:
    """Let something go on while the block runs, and no longer. It must not end by itself."""
    task = asyncio.create_task(work)
    try:
        yield
        assert not task.done(), task.exception()
    finally:
        task.cancel()


@asynccontextmanager
async def loaded(site: Site, folder: Path, more: str = EAGER, replicas: str = "{min: 1, max: 4}") -> AsyncIterator[Any]:
    """Run a daemon on a Deployment that is there, under a load that the block may change."""
    place, load = site.place, Load()
    rules = policy(folder, place.plane, place.namespace, replicas=replicas, more=more)
    async with during(load.spread(place)), running_daemon(site.kubeconfig, rules) as daemon:
        yield daemon, load
        assert await daemon.end(signal.SIGTERM) == 0


async def patch(place: Place, change: Json, content_type: str = MERGE, manager: str = "kubectl-edit") -> None:
    """Change the Deployment under a field manager's name."""
    path = f"{place.deployments}/chat"
    await place.api.request("PATCH", path, change, content_type=content_type, query={"fieldManager": manager})


async def writes_of(place: Place) -> list[tuple[str, int, float]]:
    """Return who set the replicas to what, and when: the daemon, or somebody else; oldest first."""
    return [
        ("us" if event.right == SCALE_WRITE else "them", _replicas(event), event.answered_at)
        for event in await place.plane.audit()
        if event.namespace == place.namespace and event.wrote and event.name == "chat" and _replicas(event) >= 0
    ]


def _replicas(event: AuditEvent) -> int:
    """Return the replicas that a request asked for; -1 where it asked for none."""
    sent = event.sent
    if isinstance(sent, list):
        return next((int(step["value"]) for step in sent if (step["op"], step["path"]) == REPLACE), -1)
    spec = sent.get("spec") if isinstance(sent, dict) else None
    return int(spec.get("replicas", -1)) if isinstance(spec, dict) and event.verb != "create" else -1


async def told(place: Place, reason: str) -> list[str]:
    """Return what our Events of a reason say."""
    events = await place.api.items(f"/api/v1/namespaces/{place.namespace}/events")
    return [str(event["message"]) for event in events if event["reason"] == reason]


# --- who writes the replicas ----------------------------------------------------------------------------------------


async def keep_resetting(place: Place, replicas: int) -> None:
    """Set the replicas back, soon after each change of somebody else's, for ever."""
    while True:
        if (await place.read())["spec"]["replicas"] != replicas:
            await asyncio.sleep(0.3)
            await patch(place, {"spec": {"replicas": replicas}}, manager=GITOPS)
        await asyncio.sleep(0.05)


STAND_DOWN_S = 6.0
OWNERS = f"  owners: {{reversions: 3, window: 5m, standDown: {STAND_DOWN_S:g}s}}\n"


async def test_c109_someone_keeps_resetting_replicas(site: Site, tmp_path: Path) -> None:
    place = site.place
    await place.create(deployment(replicas=2))
    await place.until_ready(2)
    async with loaded(site, tmp_path, EAGER + OWNERS) as (daemon, load):
        url = await daemon.url()
        await daemon.until("decision", reason="steady", gaps={})
        load.waiting = BUSY
        async with during(keep_resetting(place, 2)):
            for _ in range(3):
                undone = await daemon.until("replicas_changed")
                assert (undone["by"], undone["before"], undone["after"], undone["undid"]) == (GITOPS, 3, 2, True)
            held = await daemon.until("decision", reason="writer_conflict")
            (words,) = held["unblocks"]
            assert "3 writes of ours were undone" in words
            assert f"{GITOPS} changed our 3 to 2" in words
            assert await total(url, "foreign_changes_total", effect="undid") == 3.0
            await daemon.until("decision", outcome="applied")  # by rule, without anybody's help

        async def is_told() -> bool:
            return any(GITOPS in message for message in await told(place, "WriterConflict"))

        await eventually(is_told, "Event that names the other manager")
    writes = await writes_of(place)
    assert [who for who, _, _ in writes[:7]] == ["us", "them"] * 3 + ["us"]
    # From the third write that was undone to the fourth nothing is written: no oscillation at our pace.
    assert writes[6][2] - writes[5][2] >= STAND_DOWN_S - 1.0


@pytest.mark.parametrize(
    ("how", "manager"),
    [pytest.param("scale", "kubectl", id="scale"), pytest.param("apply", "kubectl-client-side-apply", id="apply")],
)
async def test_an_edit_by_a_person_is_the_new_base(site: Site, tmp_path: Path, how: str, manager: str) -> None:
    place, plane = site.place, site.place.plane
    manifest = tmp_path / "chat.json"

    def apply(replicas: int) -> None:
        manifest.write_text(json.dumps(deployment(replicas=replicas)))
        plane.kubectl("-n", place.namespace, "apply", "-f", str(manifest))

    apply(2)
    await place.until_ready(2)
    async with loaded(site, tmp_path, EAGER.replace("cooldown: 0s", "cooldown: 1h")) as (daemon, load):
        await daemon.until("decision", reason="steady", gaps={})
        if how == "scale":
            plane.kubectl("-n", place.namespace, "scale", "deployment/chat", "--replicas=3")
        else:
            apply(3)
        said = await daemon.until("replicas_changed")
        assert (said["by"], said["before"], said["after"], said["undid"]) == (manager, 2, 3, False)
        assert ("written_at" in said) == (how == "apply")
        await place.until_ready(3)
        load.waiting = CALM
        held = await daemon.until("decision", reason="held_cooldown")
        assert f"since {manager} changed 2 to 3" in held["steps"][-1]

        async def is_told() -> bool:
            return any(f"{manager} changed 2 to 3" in message for message in await told(place, "ReplicasChanged"))

        await eventually(is_told, "Event that names the person's client")
    assert await site.scalings() == []


# --- what becomes of its pods ---------------------------------------------------------------------------------------


async def grow_and_shrink(daemon: Daemon, load: Load, place: Place, size: int) -> None:
    """See the daemon add one replica to so many, and take it away again."""
    load.waiting = BUSY
    await daemon.until("decision", outcome="applied", current_replicas=size, desired_replicas=size + 1)
    load.waiting = STEADY

    async def is_there() -> bool:
        return sum(map(is_ready, await place.list_pods())) == size + 1

    await eventually(is_there, f"{size + 1} ready pods")
    load.waiting = CALM
    await daemon.until("decision", outcome="applied", current_replicas=size + 1, desired_replicas=size)
    load.waiting = STEADY


async def test_c100_a_paused_deployment_is_scaled(site: Site, tmp_path: Path) -> None:
    place = site.place
    await place.create(deployment(replicas=2))
    pods = await place.until_ready(2)
    template = deployment(fake={"cold-start-seconds": 2})["spec"]["template"]
    await patch(place, {"spec": {"paused": True, "template": template}}, STRATEGIC)
    async with loaded(site, tmp_path) as (daemon, load):
        await daemon.until("decision", reason="steady", gaps={})
        await grow_and_shrink(daemon, load, place, 2)
    revision = {pod["metadata"]["labels"]["pod-template-hash"] for pod in pods}
    assert {pod["metadata"]["labels"]["pod-template-hash"] for pod in await place.list_pods()} == revision


async def test_c101_progress_deadline_exceeded(site: Site, tmp_path: Path) -> None:
    place = site.place
    manifest = deployment(replicas=3, strategy=SURGE)
    manifest["spec"]["progressDeadlineSeconds"] = 2
    await place.create(manifest)
    await place.until_ready(3)
    await patch(place, {"spec": {"template": deployment(fake={"fail": "never-ready"})["spec"]["template"]}}, STRATEGIC)

    async def has_failed() -> bool:
        return condition(await place.read(), "Progressing").get("reason") == "ProgressDeadlineExceeded"

    await eventually(has_failed, "rollout that has failed")
    async with loaded(site, tmp_path) as (daemon, load):
        url = await daemon.url()
        await daemon.until("decision", reason="steady", ready_replicas=3)
        load.waiting = BUSY
        held = await daemon.until("decision", reason="rollout_unhealthy")
        assert held["steps"][-1] == "rollout_unhealthy 6->3: the rollout makes no progress"
        assert await total(url, "rollout_unhealthy", policy="chat") == 1.0
        load.waiting = CALM
        await daemon.until("decision", outcome="applied", current_replicas=3, desired_replicas=2)
        load.waiting = STEADY
        await daemon.until("decision", current_replicas=2)
        await asyncio.to_thread(place.plane.kubectl, "-n", place.namespace, "rollout", "undo", "deployment/chat")
        load.waiting = BUSY
        await daemon.until("decision", outcome="applied", current_replicas=2, desired_replicas=3)
        assert await total(url, "rollout_unhealthy", policy="chat") == 0.0
    assert [(who, count) for who, count, _ in await writes_of(place)] == [("us", 2), ("us", 3)]


async def test_c111_scale_down_cuts_a_long_stream(site: Site, tmp_path: Path) -> None:
    place = site.place
    await place.create(deployment(replicas=2))
    await place.until_ready(2)
    more = EAGER.replace("requireDrain: false", "requireDrain: true")
    async with loaded(site, tmp_path, more) as (daemon, load):
        url = await daemon.url()
        await daemon.until("decision", reason="steady", gaps={})
        load.waiting = BUSY
        await daemon.until("decision", outcome="applied", desired_replicas=3)
        await place.until_ready(3)
        load.waiting = CALM
        held = await daemon.until("decision", reason="unsafe_drain")
        assert "terminationGracePeriodSeconds 5 < preStop 0 + drain 300" in held["steps"][-1]
        for _ in range(3):
            assert (await daemon.until("decision"))["desired_replicas"] == 3
        assert await total(url, "unsafe_drain", policy="chat") == 1.0
        template = deployment(args=["--max-num-seqs", "64", "--shutdown-timeout", "300"])["spec"]["template"]
        template["spec"]["terminationGracePeriodSeconds"] = 330
        await patch(place, {"spec": {"template": template}}, STRATEGIC)
        await daemon.until("decision", outcome="applied", current_replicas=3, desired_replicas=2)
        assert await total(url, "unsafe_drain", policy="chat") == 0.0
    assert len(daemon.of("unsafe_drain")) == 1


async def test_a_template_without_time_to_drain_is_only_warned_of_unless_it_is_required(
    site: Site, tmp_path: Path
) -> None:
    place = site.place
    await place.create(deployment(replicas=2))
    await place.until_ready(2)
    async with loaded(site, tmp_path) as (daemon, load):
        await daemon.until("unsafe_drain")
        load.waiting = CALM
        await daemon.until("decision", outcome="applied", current_replicas=2, desired_replicas=1)
    assert len(daemon.of("unsafe_drain")) == 1


QUOTAS = "/api/v1/namespaces/{namespace}/resourcequotas"


def quota(gpus: int) -> Json:
    """Return a quota of so many GPUs."""
    return {"metadata": {"name": "gpus"}, "spec": {"hard": {"requests.nvidia.com/gpu": str(gpus)}}}


async def test_pods_that_a_quota_forbids_are_not_ordered_again(site: Site, tmp_path: Path) -> None:
    place = site.place
    quotas = QUOTAS.format(namespace=place.namespace)
    await place.api.request("POST", quotas, quota(2))
    await place.create(deployment(replicas=2))
    await place.until_ready(2)
    async with loaded(site, tmp_path) as (daemon, load):
        await daemon.until("decision", reason="steady", gaps={})
        load.waiting = BUSY
        await daemon.until("decision", outcome="applied", desired_replicas=3)
        held = await daemon.until("decision", reason="quota")
        assert "exceeded quota: gpus" in held["steps"][-1]
        for _ in range(3):
            assert (await daemon.until("decision"))["desired_replicas"] == 3
        await place.api.request("PATCH", f"{quotas}/gpus", quota(4), content_type=MERGE)
        await daemon.until("decision", outcome="applied", current_replicas=3, desired_replicas=4)
    assert [count for _, count, _ in await writes_of(place)] == [3, 4]
