"""The plugin inside real vLLM servers: what it moves, what it refuses, and what it leaves alone."""

import asyncio
import json
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.vllm.daemon import left_alone
from tests.vllm.load import Load, load, until_ended
from tests.vllm.server import LIMITS, TOKEN, WITHOUT_ENDPOINTS, Place, Start, VllmServer, running_server

WAIT_LIMIT_S = 300.0
CEILINGS = {"max_num_seqs": 16, "max_num_batched_tokens": 512, "long_prefill_token_threshold": 512}
STARTUP = CEILINGS | {"long_prefill_token_threshold": 0}
pytestmark = [pytest.mark.timeout(1500), pytest.mark.asyncio(loop_scope="session")]


async def until(true: Callable[[], Awaitable[bool]], what: str) -> float:
    """Wait until something is so, and return how long that took [s]."""
    began = time.monotonic()
    while not await true():
        assert time.monotonic() - began < WAIT_LIMIT_S, f"not {what}"
        await asyncio.sleep(0.05)
    return time.monotonic() - began


async def cap_is_obeyed(server: VllmServer, traffic: Load) -> dict[str, float]:
    """Lower the cap under load and raise it again; return how long each took [s].

    Down: from when those that ran have ended, never more run than the cap says.
    """

    async def all_places_taken() -> bool:
        return await server.running() == 16

    await until(all_places_taken, "16 running")
    began = time.monotonic()
    await server.moved(max_num_seqs=3)
    await until_ended(traffic.running)
    took = {"lifetime": time.monotonic() - began}

    async def drained() -> bool:
        return await server.running() <= 3

    # The page shows the last step that was made: at most one step more.
    took["down"] = took["lifetime"] + await until(drained, "at most 3 running")
    end = len(traffic.streams) + 12
    while len(traffic.streams) < end:
        assert await server.running() <= 3
        await asyncio.sleep(0.1)
    await server.moved()
    took["up"] = await until(all_places_taken, "16 running again")
    return took


async def budget_is_obeyed(server: VllmServer, traffic: Load) -> None:
    """Lower the token budget under load and raise it again: tokens a step say what held.

    vLLM counts a prompt when its last token is computed, so that whole prompts may be counted late: 16 of them. And the
    page is behind the steps when its server is busy: over many of them that is little.
    """
    enough_steps = 1000

    async def tokens() -> float:
        page = await server.metrics()
        return page["vllm:prompt_tokens_total"] + page["vllm:generation_tokens_total"]

    async def steps() -> int:
        return int((await server.limits())["engines"][0]["steps"])

    async def tokens_in(count: int) -> float:
        """Return the mean tokens of a step, over at least so many."""
        first_step, first_token = await steps(), await tokens()

        async def enough() -> bool:
            return await steps() > first_step + count

        await until(enough, f"{count} steps")
        last_token, last_step = await tokens(), await steps()
        return (last_token - first_token) / (last_step - first_step)

    late = 16 * traffic.prompt / enough_steps
    state = await server.moved(max_num_batched_tokens=20)
    assert state["engines"][0]["effective"]["max_num_batched_tokens"] == 20
    assert await tokens_in(enough_steps) <= 20 + late
    await server.moved()
    assert await tokens_in(enough_steps) > 20 + late


async def test_limits_move_under_load_and_no_request_fails(
    place: Place, record_property: Callable[[str, object], None]
) -> None:
    async with running_server(place) as server:
        state = await server.limits()
        (engine,) = state["engines"]
        assert (state["status"], state["vllm"], state["native"]) == ("active", place.release, [])
        assert (engine["startup"], engine["ceilings"]) == (STARTUP, CEILINGS)
        assert engine["admission"] == ("clamp" if place.release in WITHOUT_ENDPOINTS else "cap")
        async with load(server, 40, prompt=60) as traffic:
            took = await cap_is_obeyed(server, traffic)
            await budget_is_obeyed(server, traffic)
            # The smallest that may be asked for: nobody starves, as the floor follows what runs.
            await server.moved(max_num_batched_tokens=1, long_prefill_token_threshold=1)
            engine = (await server.limits())["engines"][0]
            assert engine["effective"]["max_num_batched_tokens"] >= engine["running"] > 1
            await server.moved()
            await traffic.until_sent(340)
        assert traffic.problems() == []
        assert sum(stream.ended for stream in traffic.streams) >= 340
        for name, seconds in took.items():
            record_property(name, round(seconds, 2))
            print(f"{place.release}: {name} {seconds:.2f} s")
        await refuses(server)
        await takes_the_file(server, place)
        os.killpg(server.process.pid, signal.SIGKILL)
    await keeps_its_values_over_a_crash(place)


async def refuses(server: VllmServer) -> None:
    """Send what must not be: each is refused with its reason, and nothing moves."""
    await server.moved(max_num_seqs=5)
    before = await server.limits()
    following = before["generation"] + 1
    for limits, status, word in (
        ({"max_num_seqs": 17}, 422, "above its ceiling 16"),
        ({"max_num_seqs": 0}, 422, "below its floor 1"),
        ({"max_num_batched_tokens": 513, "max_num_seqs": 4}, 422, "above its ceiling 512"),
        ({"max_num_seqs": 3.5}, 400, "3.5"),
        ({"max_num_seqs": True}, 400, "True"),
        ({"max_num_running_reqs": 3}, 400, "no limit 'max_num_running_reqs'"),
    ):
        answer = await server.put(following, **limits)
        assert (answer.status_code, word in answer.json()["error"]["message"]) == (status, True), answer.text
    stale = await server.put(before["generation"], max_num_seqs=6)
    assert (stale.status_code, stale.json()["error"]["generation"]) == (409, before["generation"])
    for token in ("", "wrong", TOKEN + "x"):
        answer = await server.client.put(LIMITS, json={}, headers={"X-Autoscaler-Token": token})
        assert answer.status_code == httpx.codes.UNAUTHORIZED
    # vLLM's own key as well, where its guard stands in front of the route.
    keyless = await server.client.get(LIMITS, headers={"Authorization": ""})
    assert keyless.status_code == (200 if server.release in WITHOUT_ENDPOINTS else 401)
    assert (await server.client.put(LIMITS, content=b" " * 5000)).status_code == httpx.codes.REQUEST_ENTITY_TOO_LARGE
    assert moving(await server.limits()) == moving(before)


def moving(state: dict[str, Any]) -> tuple[int, dict[str, int]]:
    """Return what a refused target must not change."""
    return state["generation"], state["engines"][0]["effective"]


async def takes_the_file(server: VllmServer, place: Place) -> None:
    """Replace the file: it is as good as a PUT."""
    following = (await server.limits())["generation"] + 1
    part = place.state() / "part"
    part.write_text(json.dumps({"generation": following, "limits": {"max_num_seqs": 7}}))
    part.replace(place.state() / "target.json")
    state = await server.limits()
    assert (state["applied_generation"], state["engines"][0]["effective"]["max_num_seqs"]) == (following, 7)
    assert state["persistent"] is True


async def keeps_its_values_over_a_crash(place: Place) -> None:
    """Start again in the same pod, as the kubelet restarts a container: the values are there before the first step."""
    async with running_server(place) as server:
        state = await server.limits()
        assert state["engines"][0]["effective"]["max_num_seqs"] == 7
        shown = json.loads((place.state() / "state-0.json").read_text())
        assert (shown["applied_generation"], shown["vllm"]) == (state["generation"], place.release)
        async with load(server, 12) as traffic:
            while len(traffic.streams) < 24:
                assert await server.running() <= 7
                await asyncio.sleep(0.1)
        assert traffic.problems() == []


OWN_SCHEDULE = """
import os
from vllm.v1.core.sched.scheduler import Scheduler

class Own(Scheduler):
    def schedule(self, *arguments, **named):
        if len(self.running) > 3 and os.path.exists(os.environ["NAIVE"]):
            self.max_num_running_reqs = 3
        return super().schedule(*arguments, **named)
"""


async def test_a_scheduler_of_its_own_is_left_alone_and_the_naive_change_would_kill_it(
    place: Place, tmp_path: Path
) -> None:
    (place.plugins / "own_schedule.py").write_text(OWN_SCHEDULE)
    naive = place.home / "naive"
    start = Start(arguments=("--scheduler-cls", "own_schedule.Own"), variables={"NAIVE": str(naive)})
    async with running_server(place, start) as server:
        state = await server.limits()
        assert (state["status"], state["reason"]["code"]) == ("passive", "other_scheduler")
        answer = await server.put(1000, max_num_seqs=3)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "passive")
        assert "the limits are not moved" in server.log.read_text(errors="replace")
        assert "passive: other_scheduler" in await left_alone(server, tmp_path)
        async with load(server, 12) as traffic:
            await traffic.until_sent(24)
            assert traffic.problems() == []
            naive.touch()
            await until(lambda: dead(server), "dead")
        assert traffic.problems()
    # What `test_limits_move_under_load_and_no_request_fails` does by the route, with more running, to no harm.
    assert "AssertionError" in server.log.read_text(errors="replace")


async def dead(server: VllmServer) -> bool:
    """Return whether the engine is: its server says so, or is gone."""
    try:
        return (await server.client.get("/health")).status_code != httpx.codes.OK
    except httpx.TransportError:
        return True


@pytest.mark.newest
async def test_every_engine_of_a_server_takes_a_target_and_keeps_room_for_speculation(place: Place) -> None:
    speculation = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 1}'
    start = Start(
        arguments=("--data-parallel-size", "2", "--speculative-config", speculation),
        variables={"VLLM_CPU_OMP_THREADS_BIND": "nobind"},
        pod="parallel",
    )
    async with running_server(place, start) as server:
        async with load(server, 30, prompt=60) as traffic:
            await traffic.until_sent(60)
            state = await server.moved(max_num_seqs=3, max_num_batched_tokens=4)
            for index, engine in enumerate(state["engines"]):
                assert (engine["engine"], engine["floors"]["max_num_batched_tokens"]) == (index, 4)
                # Four tokens for every sequence: one, and three that are guessed.
                assert engine["effective"]["max_num_batched_tokens"] >= 4 * engine["running"]

            async def drained() -> bool:
                return all(engine["running"] <= 3 for engine in (await server.limits())["engines"])

            await until(drained, "at most 3 running in each")
            await server.moved()
            await traffic.until_sent(120)
        assert traffic.problems() == []
        assert {path.name for path in place.state("parallel").iterdir()} == {
            *("state-0.json", "state-1.json", "target.json")
        }
