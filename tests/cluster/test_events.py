"""Kubernetes Events as a real API server keeps them."""

import signal
from pathlib import Path

import pytest

from autoscaler.actuators.events import RIGHTS as TELLS
from autoscaler.testbed.api import MERGE, Json
from tests.cluster.daemon import running_daemon
from tests.cluster.manifests import Place, deployment, eventually, grant, policy
from tests.cluster.site import DEPLOYED


async def ours(place: Place) -> list[Json]:
    """Return the namespace's Events that are ours, oldest first."""
    events = await place.api.items(f"/api/v1/namespaces/{place.namespace}/events")
    found = [event for event in events if event.get("reportingComponent") == "autoscaler"]
    return sorted(found, key=lambda event: (event["firstTimestamp"], event["metadata"]["creationTimestamp"]))


async def account(place: Place, folder: Path) -> Path:
    """Return the kubeconfig of the account `subject`."""
    token = await place.plane.token_for(place.namespace, "subject")
    return place.plane.kubeconfig_for(token, folder / "account.kubeconfig")


async def test_what_was_done_and_what_holds_it_is_on_the_deployment(place: Place, tmp_path: Path) -> None:
    await grant(place, DEPLOYED)
    made = await place.create(deployment(replicas=1))
    rules = policy(tmp_path, place.plane, place.namespace, replicas="{min: 2, max: 4}")
    async with running_daemon(await account(place, tmp_path), rules) as daemon:
        await daemon.until("decision", outcome="applied")
        for size in (1, 0):
            change = {"spec": {"replicas": size}}
            await place.api.request("PATCH", f"{place.deployments}/chat", change, content_type=MERGE)
            await daemon.until("decision", current_replicas=size)

        async def all_is_said() -> bool:
            return {(event["reason"], event["count"]) for event in await ours(place)} == {
                ("UpBounds", 2),
                ("ReplicasChanged", 2),
                ("ScaledToZeroExternally", 1),
            }

        await eventually(all_is_said, "Events")
        assert await daemon.end(signal.SIGTERM) == 0
    found = {event["reason"]: event for event in await ours(place)}
    assert found["UpBounds"]["message"].startswith("scaled from 1 to 2: up_bounds; ")
    assert found["ReplicasChanged"]["message"].startswith("cluster-tests changed our 2 to 0 at ")
    held = found["ScaledToZeroExternally"]
    assert held["message"].startswith("holds at 0 replicas: scaled_to_zero_externally; ")
    for event in found.values():
        about = event["involvedObject"]
        assert (about["kind"], about["name"], about["uid"]) == ("Deployment", "chat", made["metadata"]["uid"])
    kinds = {reason: event["type"] for reason, event in found.items()}
    assert kinds == {"UpBounds": "Normal", "ReplicasChanged": "Warning", "ScaledToZeroExternally": "Normal"}
    described = place.plane.kubectl("-n", place.namespace, "describe", "deployment", "chat")
    assert "ScaledToZeroExternally" in described
    assert "x2 over" in described
    assert daemon.of("events_not_written") == []


@pytest.mark.parametrize(
    ("flag", "said"),
    [pytest.param([], True, id="live"), pytest.param(["--dry-run"], False, id="dry-run")],
)
async def test_c152_only_live_asks_for_them_and_without_the_right_it_goes_on(
    place: Place, tmp_path: Path, flag: list[str], said: bool
) -> None:
    await grant(place, DEPLOYED - TELLS)
    await place.create(deployment(replicas=1))
    rules = policy(tmp_path, place.plane, place.namespace, replicas="{min: 2, max: 4}")
    async with running_daemon(await account(place, tmp_path), rules, "--once", *flag) as daemon:
        assert await daemon.ended() == 0
    user = f"system:serviceaccount:{place.namespace}:subject"
    asked = [event for event in await place.plane.audit() if (event.user, event.resource) == (user, "events")]
    assert [(event.right, event.code) for event in asked] == ([(("", "events", "create"), 403)] if said else [])
    assert [line["result"] for line in daemon.of("events_not_written")] == (["failed"] if said else [])
    assert await ours(place) == []
