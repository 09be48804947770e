"""Batching limits that are written into a real Deployment's pod template: the arguments that its pods start with.

Its pods have no plugin, and no engine either: they crash above a number of sequences, or serve.
"""

from collections.abc import Iterable
from pathlib import Path

import pytest

from autoscaler.actuators.rollout import RIGHTS as ROLLS
from autoscaler.core.note import NOTE, Note, Phase, read_note
from autoscaler.testbed.api import Json
from tests.cluster.crowd import ARGS, crowded, engines
from tests.cluster.daemon import Daemon, total
from tests.cluster.manifests import Place, Pool, grant
from tests.cluster.site import DEPLOYED, ROLLOUT, SCALE_WRITE, Site, granted, site_of

(TEMPLATE_WRITE,) = ROLLS
RAISED = ("--max-num-seqs", "32", *ARGS[2:])


@pytest.fixture
async def rolling(place: Place, tmp_path: Path) -> Site:
    """Return a namespace with an account that has the rights of the live overlay and of the component."""
    await grant(place, DEPLOYED | granted(ROLLOUT), "subject")
    return await site_of(place, "subject", tmp_path)


async def until(daemon: Daemon, reason: str, **fields: object) -> Json:
    """Return the next decision with that reason of the batching limits."""
    while True:
        line = await daemon.until("decision", **fields)
        if line["batching"]["reason"] == reason:
            batching: Json = line["batching"]
            return batching


def args_of(item: Json) -> tuple[str, ...]:
    return tuple(item["spec"]["template"]["spec"]["containers"][0]["args"])


def note_of(item: Json) -> Note:
    note = read_note(item["metadata"]["annotations"][NOTE])
    assert note is not None
    return note


def uids(pods: Iterable[Json]) -> set[str]:
    return {str(pod["metadata"]["uid"]) for pod in pods}


async def events(place: Place, reason: str) -> list[Json]:
    return await place.api.items(f"/api/v1/namespaces/{place.namespace}/events", fieldSelector=f"reason={reason}")


async def test_c114_a_value_with_which_new_pods_crash_is_taken_back_once_and_for_all(
    rolling: Site, pool: Pool, tmp_path: Path
) -> None:
    place = rolling.place
    await place.create(engines(pool.label, **{"most-seqs": 16}))
    old = await place.until_ready(2)
    async with crowded(rolling, tmp_path) as daemon:
        url = await daemon.url()
        begun = await until(daemon, "raise_sequences", action="roll_out", outcome="applied")
        assert begun["wanted"] == "seqs 32, tokens 2048"
        await place.until(lambda pods: len(pods) == 3, "new pod")
        assert args_of(await place.read()) == RAISED
        assert (await until(daemon, "rolling_out"))["applied"] is False
        back = await until(daemon, "rolled_back", outcome="applied")
        assert back["detail"].startswith("seqs 32, tokens 2048 does not start: chat-")
        assert uids(await place.until_ready(2)) == uids(old)
        await until(daemon, "blacklisted")
        assert await total(url, "batching_rollouts_total", result="begun") == 1.0
        assert await total(url, "batching_rollouts_total", result="rolled_back") == 1.0
        told = await events(place, "BatchingRolledBack")
        assert [(event["type"], event["count"]) for event in told] == [("Warning", 1)]
    after = await place.read()
    assert args_of(after) == ARGS
    note = note_of(after)
    assert (note.phase, len(note.begun), [one.value for one in note.failed]) == (Phase.BACK, 1, [32])
    assert not any("not-to-be-told" in str(line) for line in daemon.seen)
    # Another daemon, which knows the annotation alone.
    async with crowded(rolling, tmp_path) as daemon:
        await until(daemon, "blacklisted")
    writes = [event.right for event in await rolling.scalings()]
    assert writes == [TEMPLATE_WRITE, TEMPLATE_WRITE]
    assert SCALE_WRITE not in writes


async def test_c120_a_value_that_serves_is_applied_once_all_pods_have_it_and_kept(
    rolling: Site, pool: Pool, tmp_path: Path
) -> None:
    place = rolling.place
    await place.create(engines(pool.label))
    old = await place.until_ready(2)
    async with crowded(rolling, tmp_path) as daemon:
        await until(daemon, "raise_sequences", action="roll_out", outcome="applied")
        kept = await until(daemon, "kept", outcome="applied")
        assert (kept["applied"], kept["verified"]) == (True, True)
        assert (await until(daemon, "rollout_budget"))["verified"] is True
    pods = await place.until_ready(2)
    assert uids(pods).isdisjoint(uids(old))
    assert all(tuple(pod["spec"]["containers"][0]["args"]) == RAISED for pod in pods)
    assert note_of(await place.read()).phase is Phase.KEPT
    assert len(await place.api.items(f"/apis/apps/v1/namespaces/{place.namespace}/replicasets")) == 2
    assert [event.right for event in await rolling.scalings()] == [TEMPLATE_WRITE, TEMPLATE_WRITE]
    meanwhile = [line["batching"]["applied"] for line in daemon.of("decision") if "applied" in line["batching"]]
    first, last = meanwhile.index(False), len(meanwhile) - meanwhile[::-1].index(False)
    assert set(meanwhile[first:last]) == {False}
    assert meanwhile[-1] is True


async def test_c119_a_template_that_somebody_applies_is_left_alone_and_a_dry_run_says_what_it_would_do(
    rolling: Site, pool: Pool, tmp_path: Path
) -> None:
    place = rolling.place
    await place.create(engines(pool.label))
    await place.until_ready(2)
    before = await place.read()
    async with crowded(rolling, tmp_path, "--dry-run") as daemon:
        would = await until(daemon, "raise_sequences", action="roll_out", outcome="simulated")
        assert would["wanted"] == "seqs 32, tokens 2048"
        await until(daemon, "rollout_budget")
    await place.apply(engines(pool.label))
    async with crowded(rolling, tmp_path) as daemon:
        owned = await until(daemon, "template_owned")
        assert owned["detail"].endswith("(field manager of the arguments) would undo it")
    after = await place.read()
    assert after["spec"] == before["spec"]
    assert await rolling.scalings() == []
