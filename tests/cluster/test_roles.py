"""The Roles of deploy/ are exactly sufficient: with them all of it works, and without any one right something breaks.

A new right needs a row here. What a row's scenario returns is what a person would see of the daemon or of the cluster.
"""

import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from autoscaler.actuators.rollout import RIGHTS as ROLLS
from autoscaler.lease import RELEASED_S
from autoscaler.sources.annotations import PAUSED, PIN
from autoscaler.testbed.api import MERGE, ApiError, Json
from tests.cluster.crowd import crowded, engines
from tests.cluster.daemon import Daemon, running_daemon
from tests.cluster.manifests import Place, Right, autoscaler_of, deployment, eventually, grant, policy
from tests.cluster.proxy import running_proxy
from tests.cluster.site import ROOT, Site, granted, site_of

(TEMPLATE_WRITE,) = ROLLS
GRANTED = granted(*(str(path.parent) for path in (ROOT / "deploy").rglob("role.yaml")))
"""What the base, its overlay and its components grant together."""
LEASE = "/apis/coordination.k8s.io/v1/namespaces/{}/leases"
SCALE = r"/deployments/chat/scale$"


# --- scenarios ------------------------------------------------------------------------------------------------------


async def reads(site: Site, folder: Path) -> str:
    """Look once, and return what comes of it."""
    decision = await one_tick(site, folder, "--dry-run")
    return f"{decision['reason']} {decision['outcome']}" if "reason" in decision else str(decision["detail"])


async def sees_an_autoscaler(site: Site, folder: Path) -> str:
    """Look once at a target that an HPA owns."""
    await site.place.apply(autoscaler_of("chat"))
    return await reads(site, folder)


async def writes(site: Site, folder: Path) -> str:
    """Scale once, and return what became of it."""
    return str((await one_tick(site, folder))["outcome"])


async def writes_without_an_answer(site: Site, folder: Path) -> str:
    """Scale once; the API server does it, and its answer is lost."""
    async with running_proxy(site.place.plane) as proxy:
        token = await site.place.plane.token_for(site.place.namespace, "subject")
        behind = site._replace(kubeconfig=proxy.kubeconfig_for(token, folder / "behind.kubeconfig"))
        with proxy.rule(method="PATCH", path=SCALE, drop="after"):
            outcome = await writes(behind, folder)
    assert (await site.place.read())["spec"]["replicas"] == 2
    return outcome


async def tells(site: Site, folder: Path) -> str:
    """Scale once, and return the Events that are there then."""
    await writes(site, folder)
    return await events(site.place)


async def tells_twice(site: Site, folder: Path) -> str:
    """Scale, and a moment later once more for the same reason."""
    async with running_daemon(site.kubeconfig, rules(site, folder)) as daemon:
        await scaled_twice(site.place, daemon)
        assert await daemon.end(signal.SIGTERM) == 0  # with all Events written
    return await events(site.place)


async def makes_the_lease(site: Site, folder: Path) -> str:
    """Start where no Lease is, and return what is there then."""
    parent = LEASE.format(site.place.namespace)
    async with running_daemon(site.kubeconfig, rules(site, folder), *lease(site)) as daemon:
        await daemon.until("decision", outcome="standby")
        with suppress(TimeoutError):
            await eventually(lambda: exists(site.place, f"{parent}/autoscaler"), "Lease", 5.0)
    return ", ".join(item["metadata"]["name"] for item in await site.place.api.items(parent))


async def takes_the_lease(site: Site, folder: Path) -> str:
    """Start where a Lease is free, and return the first word of the election."""
    await free_lease(site.place)
    async with running_daemon(site.kubeconfig, rules(site, folder), *lease(site)) as daemon:
        await daemon.until("decision")
        while not daemon.of("leading") and not daemon.of("lease_trouble"):
            await daemon.until("decision")
    (first, *_) = daemon.of("leading") or daemon.of("lease_trouble")
    return str(first.get("detail", first["event"]))


async def marks_before_a_step_down(site: Site, folder: Path) -> str:
    """Take one of three pods away, of which one is idle, and only if the others need not fear; return the outcome."""
    await idle_and_busy(site.place)
    await annotate(site.place, {PIN: "2"})
    return await writes(site, folder)


async def changes_a_limit(site: Site, folder: Path) -> str:
    """Have engines that are full, and return what becomes of the first change of their limits."""
    place = site.place
    await place.api.request("DELETE", f"{place.deployments}/chat")
    await place.until(lambda pods: not pods, "pods that are gone")
    await place.create(engines())
    await place.until_ready(2)
    async with crowded(site, folder) as daemon:
        return str((await daemon.until("decision", action="roll_out"))["outcome"])


# --- what they are made of ------------------------------------------------------------------------------------------


def rules(site: Site, folder: Path) -> Path:
    """Return a policy that wants two replicas where there is one, and never gives up a pod without a mark."""
    more = "  scaleDown: {victims: {order: emptiest, onFailure: hold}}\n"
    return policy(folder, site.place.plane, site.place.namespace, replicas="{min: 2, max: 4}", more=more)


def lease(site: Site) -> tuple[str, str]:
    """Return the arguments of a daemon that writes only while it leads."""
    return "--lease", f"{site.place.namespace}/autoscaler"


async def one_tick(site: Site, folder: Path, *flags: str) -> Json:
    """Return the only decision of a daemon, or why there is none."""
    async with running_daemon(site.kubeconfig, rules(site, folder), "--once", *flags) as daemon:
        await daemon.ended()
    (line,) = daemon.of("decision") or daemon.of("tick_failed")
    return line


async def scaled_twice(place: Place, daemon: Daemon) -> None:
    """Return once a replica was ordered, taken away by a person, and ordered again."""
    await daemon.until("decision", outcome="applied")
    await resize(place, 1)
    await daemon.until("decision", outcome="applied")


async def resize(place: Place, replicas: int) -> None:
    """Set the replicas, as a person does."""
    patch = {"spec": {"replicas": replicas}}
    await place.api.request("PATCH", f"{place.deployments}/chat", patch, content_type=MERGE)


async def annotate(place: Place, annotations: dict[str, str | None]) -> None:
    """Annotate the target; None removes an annotation."""
    patch = {"metadata": {"annotations": annotations}}
    await place.api.request("PATCH", f"{place.deployments}/chat", patch, content_type=MERGE)


async def idle_and_busy(place: Place) -> None:
    """Have three pods that are ready, of which one is idle."""
    await resize(place, 3)
    pods = await place.until_ready(3)
    await place.tell(pods[:2], running=8)


async def events(place: Place) -> str:
    """Return our Events of a namespace, each with its reason and count."""
    found = await place.api.items(f"/api/v1/namespaces/{place.namespace}/events")
    ours = [f"{item['reason']} x{item['count']}" for item in found if item.get("reportingComponent") == "autoscaler"]
    return ", ".join(sorted(ours))


async def free_lease(place: Place) -> None:
    """Make a Lease as a leader leaves it that has ended well."""
    spec = {"holderIdentity": "", "leaseDurationSeconds": RELEASED_S}
    manifest = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": "autoscaler"}}
    await place.api.request("POST", LEASE.format(place.namespace), {**manifest, "spec": spec})


async def exists(place: Place, path: str) -> bool:
    """Return whether there is something at a path."""
    try:
        await place.api.get(path)
    except ApiError as error:
        if error.status != 404:
            raise
        return False
    return True


# --- the table ------------------------------------------------------------------------------------------------------

Scenario = Callable[[Site, Path], Awaitable[str]]


class Row(NamedTuple):
    """One right.

    Attributes:
        broken: what the scenario returns without it; the start of that.
    """

    right: Right
    scenario: Scenario
    broken: str


WORKS: dict[Scenario, str] = {
    reads: "up_bounds simulated",
    sees_an_autoscaler: "other_owner unchanged",
    writes: "applied",
    writes_without_an_answer: "applied",
    tells: "UpBounds x1",
    tells_twice: "ReplicasChanged x1, UpBounds x2",
    makes_the_lease: "autoscaler",
    takes_the_lease: "leading",
    marks_before_a_step_down: "applied",
    changes_a_limit: "applied",
}
"""What each scenario returns with all rights."""

ROWS = (
    *(
        Row((group, kind, verb), reads, f"forbidden: GET {path}/{kind}: 403")
        for group, kind, path in (
            ("apps", "deployments", "/apis/apps/v1/namespaces/{namespace}"),
            ("apps", "replicasets", "/apis/apps/v1/namespaces/{namespace}"),
            ("", "pods", "/api/v1/namespaces/{namespace}"),
        )
        for verb in ("list", "watch")
    ),
    Row(("autoscaling", "horizontalpodautoscalers", "list"), sees_an_autoscaler, "up_bounds simulated"),
    Row(("autoscaling", "horizontalpodautoscalers", "watch"), sees_an_autoscaler, "up_bounds simulated"),
    Row(("apps", "deployments/scale", "patch"), writes, "failed"),
    Row(("apps", "deployments/scale", "get"), writes_without_an_answer, "failed"),
    Row(("", "events", "create"), tells, ""),
    Row(("", "events", "patch"), tells_twice, "ReplicasChanged x1, UpBounds x1"),
    Row(("coordination.k8s.io", "leases", "create"), makes_the_lease, ""),
    Row(("coordination.k8s.io", "leases", "get"), takes_the_lease, "GET /apis/coordination.k8s.io/v1/"),
    Row(("coordination.k8s.io", "leases", "patch"), takes_the_lease, "PATCH /apis/coordination.k8s.io/v1/"),
    Row(("", "pods", "patch"), marks_before_a_step_down, "failed"),
    Row(TEMPLATE_WRITE, changes_a_limit, "failed"),
)


def test_every_right_that_is_granted_has_one_row() -> None:
    assert Counter(row.right for row in ROWS) == Counter(GRANTED)
    assert {row.scenario for row in ROWS} == set(WORKS)


@pytest.mark.parametrize("scenario", WORKS, ids=lambda scenario: str(scenario.__name__))
async def test_with_all_rights(place: Place, tmp_path: Path, scenario: Scenario) -> None:
    await place.create(deployment(replicas=1))
    await grant(place, GRANTED)
    site = await site_of(place, "subject", tmp_path)
    assert await scenario(site, tmp_path) == WORKS[scenario]
    assert [event.right for event in await site.requests() if event.code == 403] == []


@pytest.mark.parametrize("row", ROWS, ids=lambda row: " ".join(row.right).strip())
async def test_without_the_right(place: Place, tmp_path: Path, row: Row) -> None:
    await place.create(deployment(replicas=1))
    await grant(place, GRANTED - {row.right})
    site = await site_of(place, "subject", tmp_path)
    said = await row.scenario(site, tmp_path)
    assert said != WORKS[row.scenario]
    broken = row.broken.format(namespace=place.namespace)
    assert said.startswith(broken) if broken else said == ""
    refused = {event.right for event in await site.requests() if event.code == 403}
    assert refused == {row.right}


async def test_a_life_with_everything_in_it_uses_each_right(place: Place, tmp_path: Path) -> None:
    await place.create(deployment(replicas=1))
    await grant(place, GRANTED)
    await free_lease(place)
    site = await site_of(place, "subject", tmp_path)
    async with running_proxy(place.plane) as proxy:
        token = await place.plane.token_for(place.namespace, "subject")
        kubeconfig = proxy.kubeconfig_for(token, tmp_path / "behind.kubeconfig")
        async with running_daemon(kubeconfig, rules(site, tmp_path), *lease(site)) as daemon:
            with proxy.rule(method="PATCH", path=SCALE, drop="after", times=1):
                await daemon.until("leading")
                await scaled_twice(place, daemon)
            path = LEASE.format(place.namespace) + "/autoscaler"
            await place.api.request("DELETE", path)
            await annotate(place, {PAUSED: "true"})
            await daemon.until("decision", reason="paused")
            await idle_and_busy(place)
            await annotate(place, {PAUSED: None, PIN: "2"})
            await daemon.until("decision", outcome="applied")
            await eventually(lambda: exists(place, path), "Lease that the leader made anew")
            assert await daemon.end(signal.SIGTERM) == 0
    requests = await site.requests()
    # Limits are changed in a life of their own, which test_limits_in_the_template.py has: engines have to be full.
    assert {event.right for event in requests} == GRANTED - {TEMPLATE_WRITE}
    assert not {event.code for event in requests} & {401, 403}
