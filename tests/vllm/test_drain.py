"""How real servers end: with the settings of deploy/vllm no stream is cut; without them all are, as `drain_of` says."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from autoscaler.sources.pod_template import DEFAULT_GRACE_S, drain_of
from tests.vllm.load import Load, load
from tests.vllm.server import Place, Start, VllmServer, running_server

TEMPLATE: dict[str, Any] = yaml.safe_load(
    (Path(__file__).parents[2] / "deploy" / "vllm" / "deployment.yaml").read_text(encoding="utf-8")
)["spec"]["template"]
pytestmark = [pytest.mark.timeout(1500), pytest.mark.asyncio(loop_scope="session"), pytest.mark.newest]


async def ended_under_load(server: VllmServer, grace_s: float) -> Load:
    """End a server as a kubelet does after preStop, when routers send nothing new: SIGTERM while eight streams run.

    SIGKILL comes after a grace period: an engine that cuts its streams may leave some of them open without a word.
    """
    async with load(server, 8, output=400) as traffic:
        await traffic.until_running(8)
        traffic.stopped = True
        server.process.terminate()
        try:
            await asyncio.wait_for(server.process.wait(), grace_s)
        except TimeoutError:
            os.killpg(server.process.pid, signal.SIGKILL)
    assert len(traffic.streams) == 8
    return traffic


@pytest.mark.parametrize("drains", [True, False], ids=["as-shipped", "without"])
async def test_what_a_template_says_of_its_end_is_what_happens(place: Place, drains: bool) -> None:
    (container,) = TEMPLATE["spec"]["containers"]
    arguments = [one for one in container["args"] if drains and one.startswith("--shutdown-timeout")]
    template = {"spec": {**TEMPLATE["spec"], "containers": [{**container, "args": arguments}]}}
    drain = drain_of(template)
    assert (drain.drain_s > 0) is drains
    async with running_server(place, Start(arguments=arguments)) as server:
        traffic = await ended_under_load(server, drain.grace_s if drains else DEFAULT_GRACE_S)
        assert len(traffic.problems()) == (0 if drains else 8)
        assert not drains or server.process.returncode == 0
