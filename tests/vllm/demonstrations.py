"""Two situations that a limit alone can mend, on a real server, and what comes of each: for a test and a benchmark.

A storm of preemptions: 64 requests of 964 tokens at once, and a KV cache that holds 20 of them at their full length.
And long prompts among decodes, each of which fills one step that all others wait for.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from autoscaler.core.policy import Slo, Slos
from tests.vllm.daemon import Found, Pods, daemon, pod_at, policy_of
from tests.vllm.load import Load, load
from tests.vllm.server import Place, Start, VllmServer, running_server

BETTER = 5.0
"""How much shorter than when it is left alone the p99 of ITL is to be, by the objective."""


class Came(NamedTuple):
    """What came of a window. Latencies are what clients saw [s]: p99 of ITL, and the median TTFT; NaN is unknown."""

    preemptions: float
    tokens: float
    seconds: float
    itl_s: float
    ttft_s: float

    @property
    def wasted(self) -> float:
        """Preemptions a token, which do not depend on how fast the machine is just now."""
        return self.preemptions / self.tokens

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds

    def __str__(self) -> str:
        itl = "" if math.isnan(self.itl_s) else f", ITL p99 {1000.0 * self.itl_s:.0f} ms"
        return f"{self.preemptions:.0f} preemptions, {self.rate:.0f} tokens/s, TTFT p50 {self.ttft_s:.2f} s{itl}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """One situation while it lasts.

    Args:
        tokens: of a window.
        decodes, prompts: whose ITL, and whose TTFT is looked at. None where tokens come in larger pieces.
        slos: by what a window says of the server when it is left alone.
    """

    server: VllmServer
    tokens: float
    decodes: Load | None
    prompts: Load
    slos: Callable[[Came], Slos]

    async def window(self) -> Came:
        """Return what comes of the next tokens. Raises: AssertionError, when a request failed."""
        first, began = await self._counted(), time.monotonic()
        while True:
            await asyncio.sleep(0.5)
            assert self.problems() == []
            last, now = await self._counted(), time.monotonic()
            if last[1] - first[1] >= self.tokens:
                break
        return Came(
            preemptions=last[0] - first[0],
            tokens=last[1] - first[1],
            seconds=now - began,
            itl_s=quantile(self.decodes.gaps(began) if self.decodes else [], 0.99),
            ttft_s=quantile(self.prompts.first_tokens(began), 0.5),
        )

    async def find(self, alone: Came, folder: Path) -> Found:
        """Let the daemon find the limits, and end it; what it set stays."""
        pods = Pods(pods=(pod_at(self.server.client.base_url.host),))
        async with daemon(policy_of(self.server, folder, self.slos(alone)), pods) as found:
            await found.until_calm()
        return found

    def problems(self) -> list[str]:
        """Return what went wrong of the requests that have ended."""
        return [problem for one in self.loads for problem in one.problems()]

    @property
    def loads(self) -> list[Load]:
        """All traffic."""
        return [one for one in (self.decodes, self.prompts) if one is not None]

    async def _counted(self) -> tuple[float, float]:
        """Return the preemptions and the tokens so far."""
        page = await self.server.metrics()
        return page["vllm:num_preemptions_total"], page["vllm:generation_tokens_total"]


def quantile(values: list[float], share: float) -> float:
    """Return the value that so many are at most; NaN of none."""
    return sorted(values)[math.ceil(share * len(values)) - 1] if values else math.nan


@asynccontextmanager
async def storm(place: Place) -> AsyncIterator[Scene]:
    """Start a server and the storm."""
    pieces = ("--stream-interval", "20")  # a client on the same cores has less to read
    start = Start(max_num_seqs=64, max_num_batched_tokens=2048, blocks=160, arguments=pieces)
    async with running_server(place, start) as server, load(server, 64, prompt=64, output=900) as traffic:
        scene = Scene(
            server=server,
            tokens=60_000.0,  # as many as 64 requests have
            decodes=None,
            prompts=traffic,
            slos=lambda _: Slos(ttft=Slo(seconds=30.0), itl=Slo(seconds=1.0)),
        )
        yield scene


@asynccontextmanager
async def long_prompts(place: Place) -> AsyncIterator[Scene]:
    """Start a server, eight streams, and one client with prompts of 7000 tokens."""
    start = Start(max_num_seqs=16, max_num_batched_tokens=8192, blocks=512, max_model_len=8192)
    async with (
        running_server(place, start) as server,
        load(server, 8, prompt=30, output=400) as decodes,
        load(server, 1, prompt=7000, output=24) as prompts,
    ):
        scene = Scene(
            server=server,
            tokens=8_000.0,
            decodes=decodes,
            prompts=prompts,
            slos=lambda alone: Slos(ttft=Slo(seconds=30.0), itl=Slo(seconds=alone.itl_s / BETTER)),
        )
        await scene.window()
        yield scene


DEMONSTRATIONS: dict[str, Callable[[Place], AbstractAsyncContextManager[Scene]]] = {
    "storm of preemptions": storm,
    "long prompts among decodes": long_prompts,
}
