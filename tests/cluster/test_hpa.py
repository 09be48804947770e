"""A HorizontalPodAutoscaler that really scales the daemon's target: one of them writes, never both in turn."""

import itertools
import signal
from pathlib import Path

from autoscaler.testbed.external_metrics import external_metrics
from autoscaler.testbed.plane import AuditEvent
from tests.cluster.daemon import running_daemon
from tests.cluster.manifests import deployment, policy, queue_autoscaler_of
from tests.cluster.site import Site

HPA_USER = "system:serviceaccount:kube-system:horizontal-pod-autoscaler"
QUEUE_A_REPLICA = 10
BUSY = {"rps": 2, "running": 64, "kv": 0.9, "waiting": 120, "queue": 6, "ttft": 6}
# It grows by one replica every three seconds for as long as the pods are busy.
EAGER = "  cooldown: 3s\n  scaleUp: {maxStep: 1, stabilization: 0s}\n  emergency: {enabled: false}\n"


async def written(site: Site) -> list[AuditEvent]:
    """Return who set the target's replicas, oldest first."""
    events = [event for event in await site.place.plane.audit() if event.namespace == site.place.namespace]
    return [event for event in events if event.wrote and event.resource == "deployments/scale"]


async def about_autoscalers(site: Site) -> list[AuditEvent]:
    """Return who made and removed HorizontalPodAutoscalers of the namespace."""
    events = [event for event in await site.place.plane.audit() if event.namespace == site.place.namespace]
    return [event for event in events if event.wrote and event.resource == "horizontalpodautoscalers"]


async def test_a_real_autoscaler_that_scales_is_yielded_to_within_an_interval(site: Site, tmp_path: Path) -> None:
    place, queue = site.place, 0.0

    async def read(namespace: str, metric: str, selector: str) -> float | None:
        return queue if (namespace, metric, selector) == (place.namespace, "queue", "app=chat") else None

    await place.create(deployment(replicas=1))
    await place.tell(await place.until_ready(1), **BUSY)
    rules = policy(tmp_path, place.plane, place.namespace, replicas="{min: 1, max: 8}", more=EAGER)
    async with external_metrics(place.plane, read), running_daemon(site.kubeconfig, rules) as daemon:
        first = await daemon.until("decision", outcome="applied")
        assert first["desired_replicas"] == 2
        await daemon.until("decision", outcome="applied")  # it is in the middle of growing
        queue = 3.5 * QUEUE_A_REPLICA
        autoscaler = queue_autoscaler_of("chat", each=QUEUE_A_REPLICA)
        autoscaler["spec"]["behavior"] = {"scaleDown": {"stabilizationWindowSeconds": 0}}
        await place.apply(autoscaler)
        for size in (4, 2):
            queue = (size - 0.5) * QUEUE_A_REPLICA
            await daemon.until("decision", current_replicas=size)
        await place.tell(await place.until_ready(2), **BUSY)
        path = f"/apis/autoscaling/v2/namespaces/{place.namespace}/horizontalpodautoscalers/chat"
        await place.api.request("DELETE", path)
        resumed = await daemon.until("decision", outcome="applied")
        assert (resumed["current_replicas"], resumed["desired_replicas"]) == (2, 3)
        assert await daemon.end(signal.SIGTERM) == 0
    created, deleted = [event.answered_at for event in await about_autoscalers(site)]
    beside = [line for line in daemon.of("decision") if created < line["at"] < deleted]
    assert len(beside) > 3
    # The first may have been about to be made when the autoscaler came.
    assert {(line["action"], line["reason"]) for line in beside[1:]} == {("hold", "other_owner")}
    turns = [user for user, _ in itertools.groupby(event.user for event in await written(site))]
    assert turns == [site.user, HPA_USER, site.user]
