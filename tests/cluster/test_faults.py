"""What the daemon does while the API server fails it, and how soon it is at work again."""

import asyncio
import signal
import sys
import time
from pathlib import Path

import pytest

from autoscaler.testbed.plane import Plane
from tests.cluster.daemon import running_daemon
from tests.cluster.judge import READS
from tests.cluster.manifests import Place, deployment, eventually
from tests.cluster.trial import BUSY, CALM, LIVE, Trial, prepared, trial

pytestmark = pytest.mark.usefixtures("outage")

FROZEN_S = 60.0


async def test_the_api_server_is_killed_and_restarted_while_it_shrinks(place: Place, tmp_path: Path) -> None:
    plane = place.plane
    await place.create(deployment(replicas=4))
    await place.tell(await place.until_ready(4), **CALM)
    async with trial(place, tmp_path, bounds=(2, 4), with_dry=True) as one:
        await one.until(outcome="applied", desired_replicas=3)
        plane.api_server.kill()
        await one.until_failed("unreachable")
        plane.api_server.start()
        await plane.ready()
        await one.recovered(time.time())
        await one.until_steps((4, 3), (3, 2))


async def test_the_api_server_is_frozen_for_a_minute_while_it_grows(place: Place, tmp_path: Path) -> None:
    plane = place.plane
    await place.create(deployment(replicas=1))
    await place.tell(await place.until_ready(1), **BUSY)
    async with trial(place, tmp_path, bounds=(1, 4)) as one:
        await one.until(outcome="applied", desired_replicas=2)
        plane.api_server.send(signal.SIGSTOP)
        await asyncio.gather(asyncio.sleep(FROZEN_S), one.until_failed("unreachable"))
        plane.api_server.send(signal.SIGCONT)
        await plane.ready()
        await one.recovered(time.time())
        await one.until_steps((1, 2), (2, 3), (3, 4))


async def test_etcd_is_restarted_while_it_shrinks(place: Place, tmp_path: Path) -> None:
    plane = place.plane
    await place.create(deployment(replicas=4))
    await place.tell(await place.until_ready(4), **CALM)
    async with trial(place, tmp_path, bounds=(2, 4)) as one:
        await one.until(outcome="applied", desired_replicas=3)
        plane.etcd.kill()
        await one.until_failed("unreachable")
        plane.etcd.start()
        await plane.ready()
        await one.recovered(time.time())
        await one.until_steps((4, 3), (3, 2))


# --- the token ------------------------------------------------------------------------------------------------------


IN_POD = """\
import sys
from pathlib import Path
from autoscaler.sources.kubernetes_api import KubernetesApi
KubernetesApi.connect.__func__.__kwdefaults__["account"] = Path(sys.argv.pop(1))
from autoscaler.cli import main
main()
"""
"""`autoscaler` with a pod's files in a folder that a test can write, the first argument."""


def session_of(place: Place, name: str) -> str:
    """Return the path of a Secret, with which a token ends."""
    return f"/api/v1/namespaces/{place.namespace}/secrets/{name}"


async def token_bound_to(place: Place, name: str) -> str:
    """Return a token that is valid as long as a Secret is there, which is made now."""
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}}
    await place.api.request("POST", f"/api/v1/namespaces/{place.namespace}/secrets", secret)
    bound = {"kind": "Secret", "apiVersion": "v1", "name": name}
    answer = await place.api.request(
        "POST",
        f"/api/v1/namespaces/{place.namespace}/serviceaccounts/{LIVE}/token",
        {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"expirationSeconds": 3600, "boundObjectRef": bound},
        },
    )
    return str(answer["status"]["token"])


def pod_files(folder: Path, plane: Plane, token: str) -> Path:
    """Write what a pod finds of its account, and return the folder."""
    folder.mkdir()
    (folder / "ca.crt").write_bytes((plane.folder / "ca.crt").read_bytes())
    (folder / "token").write_text(token)
    return folder


async def was_refused_twice(plane: Plane, since: float) -> bool:
    """Return whether a login was refused twice since then, each time after a second look at the token."""
    refused = [event for event in await plane.audit() if event.code == 401 and event.answered_at >= since]
    ours = [event for event in refused if event.agent.startswith("vllm-autoscaler")]
    return sum(event.verb in READS for event in ours) >= 4


async def test_its_token_is_refused_and_rotated_later_while_it_shrinks(place: Place, tmp_path: Path) -> None:
    plane = place.plane
    await place.create(deployment(replicas=4))
    await place.tell(await place.until_ready(4), **CALM)
    rules = await prepared(place, tmp_path / "policies", bounds=(2, 4))
    first, second = [await token_bound_to(place, name) for name in ("first", "second")]
    files = pod_files(tmp_path / "account", plane, first)
    environ = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": plane.url.rpartition(":")[2]}
    entry = (sys.executable, "-c", IN_POD, str(files), "run")
    async with running_daemon(None, tmp_path / "policies", entry=entry, environ=environ) as daemon:
        one = Trial(place, daemon, None, rules)
        await one.until(outcome="applied", desired_replicas=3)
        ended_at = time.time()
        await place.api.request("DELETE", session_of(place, "first"))
        await one.until_failed("unauthorized")
        # It waits for ten seconds after that.
        await eventually(lambda: was_refused_twice(plane, ended_at), "second refusal")
        (files / "token").write_text(second)
        await one.recovered(time.time())
        await one.until_steps((4, 3), (3, 2))
        await one.close()
