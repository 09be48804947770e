"""Propose mode, the fallback and schedules, with the daemon as a process on a real API server."""

import asyncio
import signal
from pathlib import Path

import pytest

from autoscaler.cli.main import run
from autoscaler.testbed.api import Json
from tests.cluster.daemon import Daemon, running_daemon
from tests.cluster.manifests import Place, deployment, eventually, grant, policy
from tests.cluster.site import DEPLOYED, SCALE_WRITE, Site, site_of

APPROVE = "autoscaler/approve"
PROPOSING = "  approval: {required: true, expiry: 10m}\n"


def annotate(place: Place, value: str) -> None:
    """Set the annotation as a person does."""
    plane, namespace = place.plane, place.namespace
    plane.kubectl("-n", namespace, "annotate", "deployment", "chat", "--overwrite", f"{APPROVE}={value}")


async def told(place: Place) -> list[Json]:
    """Return our Events about proposals."""
    events = await place.api.items(f"/api/v1/namespaces/{place.namespace}/events")
    return [event for event in events if str(event["reason"]).startswith("AwaitingApproval")]


async def proposed(daemon: Daemon) -> str:
    """Return the id of the proposal that waits."""
    line = await daemon.until("decision", reason="awaiting_approval")
    assert (line["action"], line["desired_replicas"]) == ("hold", line["current_replicas"])
    return str(line["approval"]["id"])


async def test_nothing_is_written_until_a_person_has_approved_it(site: Site, tmp_path: Path) -> None:
    place = site.place
    await place.create(deployment(replicas=1))
    rules = policy(tmp_path, place.plane, place.namespace, replicas="{min: 3, max: 4}", more=PROPOSING)
    async with running_daemon(site.kubeconfig, rules) as daemon:
        name = await proposed(daemon)
        assert name.startswith("up-to-3-")

        async def is_told() -> bool:
            return any(f"{APPROVE}={name}" in event["message"] for event in await told(place))

        await eventually(is_told, "an Event with the command")
        annotate(place, "up-to-3-0")
        for _ in range(3):
            assert await proposed(daemon) == name
        assert await site.scalings() == []
        annotate(place, name)
        done = await daemon.until("decision", outcome="applied")
        assert (done["current_replicas"], done["desired_replicas"], done["reason"]) == (1, 3, "up_bounds")
        assert done["approval"]["state"] == "approved"
        await place.until_ready(3)
        after = await daemon.until("decision", ready_replicas=3)
        assert "approval" not in after
        assert await daemon.end(signal.SIGTERM) == 0
    (write,) = await site.scalings()
    assert (write.right, write.answer and write.answer["spec"]) == (SCALE_WRITE, {"replicas": 3})
    assert {event["reason"] for event in await told(place)} == {"AwaitingApproval"}


async def test_a_dry_run_proposes_and_approves_alike_and_writes_nothing(site: Site, tmp_path: Path) -> None:
    place = site.place
    await place.create(deployment(replicas=1))
    rules = policy(tmp_path, place.plane, place.namespace, replicas="{min: 3, max: 4}", more=PROPOSING)
    async with running_daemon(site.kubeconfig, rules, "--dry-run") as daemon:
        annotate(place, await proposed(daemon))
        assert (await daemon.until("decision", outcome="simulated"))["desired_replicas"] == 3
        assert await daemon.end(signal.SIGTERM) == 0
    assert [event for event in await site.requests() if event.wrote] == []


async def test_the_next_leader_takes_the_approval_of_what_the_last_one_proposed(place: Place, tmp_path: Path) -> None:
    lease = f"{place.namespace}/autoscaler"
    await grant(place, DEPLOYED)
    site = await site_of(place, "subject", tmp_path)
    await place.create(deployment(replicas=1))
    rules = policy(tmp_path, place.plane, place.namespace, replicas="{min: 3, max: 4}", more=PROPOSING)
    arguments = (rules, "--lease", lease, "--lease-duration", "6s")
    async with running_daemon(site.kubeconfig, *arguments) as first:
        await first.until("leading")
        name = await proposed(first)
        assert await first.end(signal.SIGTERM) == 0
    async with running_daemon(site.kubeconfig, *arguments) as second:
        await second.until("leading")
        annotate(place, name)
        done = await second.until("decision", outcome="applied")
        assert (done["approval"]["id"], done["desired_replicas"]) == (name, 3)
        assert await second.end(signal.SIGTERM) == 0


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        pytest.param("  fallback: {replicas: 3, after: 3}\n", 3, id="with a fallback"),
        pytest.param("", 1, id="without one it holds"),
    ],
)
async def test_engines_that_do_not_answer(site: Site, tmp_path: Path, more: str, expected: int) -> None:
    place = site.place
    await place.create(deployment(replicas=1))
    pods = await place.until_ready(1)
    rules = policy(tmp_path, place.plane, place.namespace, replicas="{min: 1, max: 4}", more=more, stale_after="3s")
    async with running_daemon(site.kubeconfig, rules) as daemon:
        await daemon.until("decision", gaps={})
        await place.tell(pods, hang=5)
        blind = await daemon.until("decision", reason="no_data")
        assert (blind["action"], blind["desired_replicas"]) == ("hold", 1)
        if more:
            grown = await daemon.until("decision", outcome="applied")
            assert (grown["reason"], grown["current_replicas"], grown["desired_replicas"]) == ("up_fallback", 1, 3)
            await place.until_ready(3)
            await daemon.until("decision", ready_replicas=3)
        else:
            for _ in range(5):
                await daemon.until("decision", reason="no_data")
        await place.tell(pods, hang=0)
        await daemon.until("decision", gaps={}, current_replicas=expected)
        assert await daemon.end(signal.SIGTERM) == 0
    sizes = [write.answer["spec"]["replicas"] for write in await site.scalings() if write.answer is not None]
    assert sizes == ([expected] if more else [])


async def test_a_schedule_that_is_active_raises_the_lower_bound_and_replays(site: Site, tmp_path: Path) -> None:
    place = site.place
    await place.create(deployment(replicas=1))
    window = '  schedules: [{name: now, cron: "* * * * *", timezone: Asia/Shanghai, duration: 2m, min: 3}]\n'
    rules = policy(tmp_path, place.plane, place.namespace, replicas="{min: 1, max: 4}", more=window)
    trace = tmp_path / "chat.trace.gz"
    async with running_daemon(site.kubeconfig, rules, "--record", trace) as daemon:
        up = await daemon.until("decision", outcome="applied")
        assert (up["current_replicas"], up["desired_replicas"], up["reason"]) == (1, 3, "up_bounds")
        assert up["bounds"] == "min 3, max 4 by schedule now"
        assert up["steps"] == ["limited_min 1->3: min 3, max 4 by schedule now"]
        await place.until_ready(3)
        await daemon.until("decision", ready_replicas=3)
        assert await daemon.end(signal.SIGTERM) == 0
    assert len(await site.scalings()) == 1
    assert await asyncio.to_thread(run, ["replay", str(trace), "--verify"]) == 0
