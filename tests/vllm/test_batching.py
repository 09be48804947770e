"""The daemon's own loop on real servers: it finds the limits by itself, and no request fails for it."""

from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from autoscaler.core.policy import Slo, Slos
from autoscaler.core.types import BatchReason
from autoscaler.testbed.plane import free_ports
from tests.vllm.daemon import Pods, daemon, pod_at, policy_of
from tests.vllm.demonstrations import long_prompts, storm
from tests.vllm.load import load
from tests.vllm.server import Place, Start, running_server

pytestmark = [pytest.mark.timeout(1500), pytest.mark.asyncio(loop_scope="session"), pytest.mark.newest]


@pytest.mark.demonstration
async def test_a_storm_of_preemptions_is_found_and_ended(place: Place, tmp_path: Path) -> None:
    async with storm(place) as scene:
        alone = await scene.window()
        found = await scene.find(alone, tmp_path)
        moved = await scene.window()
        print(f"left alone: {alone}; moved: {moved}", *found.words(), sep="\n")
        assert alone.preemptions > 0
        assert moved.wasted <= 0.1 * alone.wasted
        cap = found.limits.max_num_seqs
        assert cap is not None
        assert 8 <= cap < 64
        assert (await scene.server.limits())["engines"][0]["targets"]["max_num_seqs"] == cap
    assert scene.problems() == []


@pytest.mark.demonstration
async def test_steps_become_short_enough_for_what_is_asked_of_itl(place: Place, tmp_path: Path) -> None:
    async with long_prompts(place) as scene:
        alone = await scene.window()
        found = await scene.find(alone, tmp_path)
        moved = await scene.window()
        print(f"left alone: {alone}; moved: {moved}", *found.words(), sep="\n")
        assert found.moves[0].reason is BatchReason.LOWER_BUDGET
        budget = found.limits.max_num_batched_tokens
        assert budget is not None
        assert 16 <= budget <= 8192 / 2
        assert (await scene.server.limits())["engines"][0]["effective"]["max_num_batched_tokens"] == budget
    assert scene.problems() == []


async def test_a_pod_that_becomes_ready_is_told_and_then_all_move_together(place: Place, tmp_path: Path) -> None:
    port = free_ports(1)[0]
    async with AsyncExitStack() as stack:
        old, new = [
            await stack.enter_async_context(running_server(place, Start(host=host, port=port, pod=host)))
            for host in ("127.0.0.2", "127.0.0.3")
        ]
        await old.moved(max_num_seqs=4)
        traffic = [await stack.enter_async_context(load(server, 24, output=200)) for server in (old, new)]
        pods = Pods(pods=(pod_at("127.0.0.2"), pod_at("127.0.0.3", ready=False)))
        policy = policy_of(old, tmp_path, Slos(ttft=Slo(seconds=30.0), itl=Slo(seconds=1.0)), replicas=2)
        async with daemon(policy, pods) as found:
            await found.until(lambda: found.batching.limits.max_num_seqs == 4, "taken over")
            assert (await new.limits())["generation"] == 0
            pods.become_ready("chat-127.0.0.3")
            await found.until(lambda: len(found.moves) >= 1, "told")
            assert [(one.reason, [pod.pod for pod in one.pods]) for one in found.moves] == [
                (BatchReason.ALIGN, ["chat-127.0.0.3"])
            ]
            assert (await new.limits())["engines"][0]["effective"]["max_num_seqs"] >= 4
            assert (await new.limits())["engines"][0]["targets"]["max_num_seqs"] == 4
            await found.until(lambda: len(found.moves) >= 2, "moved")
            assert found.moves[1].reason is BatchReason.RAISE_SEQUENCES
            raised = found.moves[1].wanted
            assert raised is not None
            for server in (old, new):
                assert (await server.limits())["engines"][0]["targets"]["max_num_seqs"] == raised.max_num_seqs
        assert [one.problems() for one in traffic] == [[], []]
