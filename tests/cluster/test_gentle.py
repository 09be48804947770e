"""A step down that marks the pods that are to go, judged by what a real ReplicaSet takes and by the audit log.

By itself Kubernetes would as a rule take other pods: the newest.
"""

import asyncio
import os
import signal
from pathlib import Path

import httpx
import pytest

from autoscaler.actuators.deletion_cost import RIGHTS as MARKS
from autoscaler.core.victims import ANNOTATION
from autoscaler.testbed.api import MERGE, Json
from autoscaler.testbed.plane import AuditEvent
from tests.cluster.daemon import Daemon, running_daemon
from tests.cluster.manifests import (
    Place,
    Pool,
    deployment,
    grant,
    is_ready,
    is_unschedulable,
    policy,
    until_granted,
)
from tests.cluster.site import BASE, DEPLOYED, GENTLE, LIVE, Site, granted, site_of

MARK, SCALE = ("", "pods", "patch"), ("apps", "deployments/scale", "patch")
PIN = "autoscaler/pin"
# The load of two kinds of parts, without latency, decides at once, and windows are short.
QUICK = """\
  sizing: score
  score: {{weights: {{memory: 0.6, backlog: 0.4, latency: 0}}, warmUp: 0s}}
  cooldown: 0s
  scaleUp: {{turn: 0s}}
  scaleDown: {{stabilization: 2s, horizonFactor: 0, turn: 0s, victims: {{order: emptiest, onFailure: {on_failure}}}}}
"""


@pytest.fixture
async def gentle(place: Place, tmp_path: Path) -> Site:
    """Return a namespace with an account that has the rights of the live overlay and of the component."""
    await grant(place, DEPLOYED | granted(GENTLE), "subject")
    return await site_of(place, "subject", tmp_path)


async def three_pods(place: Place, pool: Pool) -> list[Json]:
    """Return three ready pods on one node, the oldest first, which Kubernetes would take last."""
    await place.create(deployment(replicas=1, pool=pool.label))
    oldest = await place.until_ready(1)
    await resize(place, 3)
    newer = [pod for pod in await place.until_ready(3) if uid_of(pod) != uid_of(oldest[0])]
    return [*oldest, *newer]


async def resize(place: Place, replicas: int) -> None:
    """Set the replicas, as a person does."""
    patch = {"spec": {"replicas": replicas}}
    await place.api.request("PATCH", f"{place.deployments}/chat", patch, content_type=MERGE)


async def pin(place: Place, replicas: int) -> None:
    """Have the next tick bring the target to so many replicas."""
    patch = {"metadata": {"annotations": {PIN: str(replicas)}}}
    await place.api.request("PATCH", f"{place.deployments}/chat", patch, content_type=MERGE)


def rules(site: Site, folder: Path, *, replicas: str = "{min: 2, max: 4}", on_failure: str = "proceed") -> Path:
    more = QUICK.format(on_failure=on_failure)
    return policy(folder, site.place.plane, site.place.namespace, replicas=replicas, more=more)


def uid_of(pod: Json) -> str:
    return str(pod["metadata"]["uid"])


def name_of(pod: Json) -> str:
    return str(pod["metadata"]["name"])


def cost_of(pod: Json) -> str | None:
    cost: str | None = pod["metadata"].get("annotations", {}).get(ANNOTATION)
    return cost


def summary(events: list[AuditEvent]) -> list[tuple[tuple[str, str, str], str]]:
    """Return what was written, in order: with which right, and to what."""
    return [(event.right, event.name) for event in sorted(events, key=lambda event: event.answered_at)]


async def hold_some(daemon: Daemon, ticks: int, **fields: object) -> None:
    """Return once there were so many more decisions with these fields."""
    for _ in range(ticks):
        await daemon.until("decision", **fields)


async def test_c112_the_idle_pod_goes_and_no_other_is_touched(gentle: Site, pool: Pool, tmp_path: Path) -> None:
    place = gentle.place
    a, b, c = await three_pods(place, pool)
    for pod, running in ((a, 0), (b, 5), (c, 9)):
        await place.tell([pod], running=running, kv=0.05)
    async with running_daemon(gentle.kubeconfig, rules(gentle, tmp_path)) as daemon:
        assert (await daemon.until("decision", gaps={}))["action"] == "hold"
        assert summary(await gentle.scalings()) == []
        down = await daemon.until("decision", outcome="applied")
        assert (down["current_replicas"], down["desired_replicas"], down["reason"]) == (3, 2, "down_score")
        assert down["deletion_costs"] == [f"{name_of(a)} -1 (0 requests)"]
        left = await place.until_ready(2)
        await hold_some(daemon, 3, current_replicas=2, action="hold")
        assert await daemon.end(signal.SIGTERM) == 0
    assert {uid_of(pod) for pod in left} == {uid_of(b), uid_of(c)}
    assert [cost_of(pod) for pod in left] == [None, None]
    writes = await gentle.scalings()
    assert summary(writes) == [(MARK, name_of(a)), (SCALE, "chat")]
    assert writes[0].sent == {"metadata": {"uid": uid_of(a), "annotations": {ANNOTATION: "-1"}}}
    events = f"/api/v1/namespaces/{place.namespace}/events"
    (told,) = await place.api.items(events, fieldSelector="reason=DownScore")
    assert "marked 1 to go first, with 0 requests" in told["message"]


async def test_c112_in_dry_run_no_pod_is_marked(gentle: Site, pool: Pool, tmp_path: Path) -> None:
    place = gentle.place
    a, b, c = await three_pods(place, pool)
    await place.tell([b, c], running=5)
    async with running_daemon(gentle.kubeconfig, rules(gentle, tmp_path), "--dry-run") as daemon:
        down = await daemon.until("decision", outcome="simulated")
        assert down["deletion_costs"] == [f"{name_of(a)} -1 (0 requests)"]
        await hold_some(daemon, 2)
        assert await daemon.end(signal.SIGTERM) == 0
    assert await gentle.scalings() == []


@pytest.mark.parametrize("on_failure", ["proceed", "hold"])
async def test_c112_without_the_right_it_follows_the_policy_and_counts(
    site: Site, pool: Pool, tmp_path: Path, on_failure: str
) -> None:
    place = site.place
    _, b, c = await three_pods(place, pool)
    await place.tell([b, c], running=5)
    async with running_daemon(site.kubeconfig, rules(site, tmp_path, on_failure=on_failure)) as daemon:
        url = (await daemon.until("started"))["listen"]
        failed = await daemon.until("deletion_cost_not_written")
        assert "forbidden" in failed["detail"]
        outcome = "applied" if on_failure == "proceed" else "failed"
        tried = await daemon.until("decision", outcome=outcome)
        assert (tried["current_replicas"], tried["desired_replicas"]) == (3, 2)
        async with httpx.AsyncClient() as client:
            page = (await client.get(f"{url}/metrics")).text
        await hold_some(daemon, 2)
        assert await daemon.end(signal.SIGTERM) == 0
    count = next(line for line in page.splitlines() if line.startswith("autoscaler_deletion_costs_total{"))
    assert 'result="failed"' in count
    assert float(count.split()[-1]) >= 1.0
    if on_failure == "proceed":
        assert len(await place.until_ready(2)) == 2
        assert summary(await site.scalings()) == [(SCALE, "chat")]
    else:
        assert len(await place.until_ready(3)) == 3
        assert summary(await site.scalings()) == []
    refused = {event.right for event in await site.requests() if event.code == 403}
    assert refused == {MARK} == MARKS


async def test_c112_a_pod_that_has_just_loaded_is_spared(gentle: Site, pool: Pool, tmp_path: Path) -> None:
    """The third pod waits for its GPUs, so that its load takes long; all three are idle."""
    place = gentle.place
    blocker = deployment("blocker", replicas=1, gpus=4, pool=pool.label)
    await place.create(blocker)
    await place.until_ready(1, "blocker")
    await place.create(deployment(replicas=3, gpus=2, pool=pool.label))
    await pin(place, 3)
    await place.until(lambda pods: (sum(map(is_ready, pods)), sum(map(is_unschedulable, pods))) == (3, 1), "queue")
    (young,) = filter(is_unschedulable, await place.list_pods())
    async with running_daemon(gentle.kubeconfig, rules(gentle, tmp_path, replicas="{min: 1, max: 4}")) as daemon:
        await daemon.until("decision", ready_replicas=2, action="hold", reason="pinned")
        await asyncio.sleep(8.0)  # so long it loads at least, and is young for as long after it
        await place.api.request("DELETE", f"{place.deployments}/blocker")
        await place.until(lambda pods: any(is_ready(pod) and uid_of(pod) == uid_of(young) for pod in pods), "third")
        await daemon.until("decision", ready_replicas=3, gaps={})
        await pin(place, 2)
        down = await daemon.until("decision", outcome="applied")
        assert down["desired_replicas"] == 2
        assert len(down["deletion_costs"]) == 1
        left = await place.until_ready(2)
        assert await daemon.end(signal.SIGTERM) == 0
    assert uid_of(young) in {uid_of(pod) for pod in left}


async def test_what_a_refused_step_left_behind_is_cleared_with_the_next(
    gentle: Site, pool: Pool, tmp_path: Path
) -> None:
    place = gentle.place
    a, b, c = await three_pods(place, pool)
    await place.tell([b], running=9)
    await place.tell([c], running=5)
    left_over = {"metadata": {"annotations": {ANNOTATION: "-1"}}}
    await place.api.request("PATCH", f"{place.pods}/{name_of(b)}", left_over, content_type=MERGE)
    await pin(place, 2)
    async with running_daemon(gentle.kubeconfig, rules(gentle, tmp_path)) as daemon:
        await daemon.until("decision", outcome="applied")
        left = await place.until_ready(2)
        assert await daemon.end(signal.SIGTERM) == 0
    assert {uid_of(pod): cost_of(pod) for pod in left} == {uid_of(b): None, uid_of(c): None}
    *marks, scale = summary(await gentle.scalings())
    assert (sorted(marks), scale) == (sorted([(MARK, name_of(a)), (MARK, name_of(b))]), (SCALE, "chat"))


async def test_a_pod_that_somebody_protects_stays(gentle: Site, pool: Pool, tmp_path: Path) -> None:
    place = gentle.place
    a, b, c = await three_pods(place, pool)
    await place.tell([b], running=5)
    await place.tell([c], running=9)
    wish = {"metadata": {"annotations": {ANNOTATION: "100"}}}
    await place.api.request("PATCH", f"{place.pods}/{name_of(a)}", wish, content_type=MERGE)
    await pin(place, 2)
    async with running_daemon(gentle.kubeconfig, rules(gentle, tmp_path)) as daemon:
        await daemon.until("decision", outcome="applied")
        left = await place.until_ready(2)
        assert await daemon.end(signal.SIGTERM) == 0
    assert {uid_of(pod): cost_of(pod) for pod in left} == {uid_of(a): "100", uid_of(c): None}
    assert summary(await gentle.scalings()) == [(MARK, name_of(b)), (SCALE, "chat")]


# --- deploy/ --------------------------------------------------------------------------------------------------------


def overlay(folder: Path, namespace: str) -> str:
    """Write the live overlay with the component, for a namespace, and return its path."""
    live, gentle = (os.path.relpath(there, folder) for there in (LIVE, GENTLE))
    (folder / "kustomization.yaml").write_text(
        "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\n"
        f"namespace: {namespace}\nresources: [{live}]\ncomponents: [{gentle}]\n"
    )
    return str(folder)


async def test_the_component_adds_one_right_to_the_live_overlay(place: Place, tmp_path: Path) -> None:
    folder = overlay(tmp_path, place.namespace)
    place.plane.kubectl("apply", "--server-side", "--validate=strict", "-k", folder)
    await until_granted(place, granted(BASE, LIVE, GENTLE), "autoscaler")
    assert granted(GENTLE) == MARKS
    await until_granted(place, [("", "pods", "delete")], "autoscaler", allowed=False)
