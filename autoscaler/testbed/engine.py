"""A fake of a vLLM server's HTTP side: /metrics, /health and /v1/models, and no engine behind them.

Its page has vLLM's names, labels and buckets, and the numbers that a test sets. It serves no completions: requests are
only counted, at a set rate, and every one of them has the same lengths and latencies. Nothing depends on anything
else: a fuller batch is not slower, a longer queue waits no longer, and a KV cache is as full as it is told to be.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import Protocol

from aiohttp import web

from autoscaler.sim.tally import LENGTH_BOUNDS, REQUEST_BOUNDS, STEP_BOUNDS, TOKEN_BOUNDS, TTFT_BOUNDS

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
BLOCK_TOKENS = 16


@dataclass(kw_only=True)
class Load:
    """What the page is to say.

    Args:
        running, waiting: requests in the batch and in the queue.
        kv: share of the KV cache in use.
        rps: requests finished a second.
        prompt, output: tokens of each.
        ttft, itl, queue: latencies of each [s].
        preempted: preemptions a second.
        hang: seconds that /metrics takes to answer.
        health: status of /health.
    """

    running: float = 0.0
    waiting: float = 0.0
    kv: float = 0.0
    rps: float = 0.0
    prompt: float = 200.0
    output: float = 100.0
    ttft: float = 0.1
    itl: float = 0.02
    queue: float = 0.0
    preempted: float = 0.0
    hang: float = 0.0
    health: float = 200.0


class Engine(Protocol):
    """What serves in a pod, as seen from outside.

    Attributes:
        model: the served model's name.
        load: of which `hang` and `health` always count.
    """

    model: str
    load: Load

    def change(self, **numbers: float) -> None:
        """Set parts of the load, from now on. Raises TypeError for a part that cannot be set."""
        ...

    def page(self) -> str:
        """Return the page as it reads now."""
        ...

    async def drain(self, usual_s: float) -> None:
        """Return when it may end: nothing new comes, what is in flight ends.

        Args:
            usual_s: how long that takes where nothing depends on anything.
        """
        ...

    def close(self) -> None:
        """End, and let go of what is still in flight."""
        ...


@dataclass(slots=True)
class _Histogram:
    """Observations that are all alike while one load lasts."""

    bounds: tuple[float, ...]
    counts: list[float] = field(init=False)
    total: float = 0.0
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0.0] * len(self.bounds)

    def observe(self, value: float, times: float) -> None:
        for index, bound in enumerate(self.bounds):
            self.counts[index] += times * (value <= bound)
        self.total += times
        self.sum += value * times


class FakeEngine:
    """The counters behind one page, and the page.

    Args:
        model: its name.
        kv_tokens: tokens that the KV cache is said to hold.
        now: epoch seconds.
    """

    def __init__(self, model: str, kv_tokens: int = 400_000, now: Callable[[], float] = time.time) -> None:
        self.model = model
        self.load = Load()
        self._model = f'model_name="{model}"'
        self._blocks = kv_tokens // BLOCK_TOKENS
        self._now = now
        self._started_at = self._counted_at = now()
        self._preemptions = self._prompt = self._output = self._finished = 0.0
        self._histograms = {
            "time_to_first_token_seconds": _Histogram(TTFT_BOUNDS),
            "inter_token_latency_seconds": _Histogram(TOKEN_BOUNDS),
            "e2e_request_latency_seconds": _Histogram(REQUEST_BOUNDS),
            "request_queue_time_seconds": _Histogram(REQUEST_BOUNDS),
            "request_prompt_tokens": _Histogram(LENGTH_BOUNDS),
            "request_generation_tokens": _Histogram(LENGTH_BOUNDS),
            "iteration_tokens_total": _Histogram(STEP_BOUNDS),
        }

    def change(self, **numbers: float) -> None:
        """Set parts of the load, from now on. Raises TypeError for a part that there is not."""
        self._count()
        known = {part.name for part in fields(Load)}
        if not numbers.keys() <= known:
            raise TypeError(f"{sorted(numbers.keys() - known)} is not in {sorted(known)}")
        for name, number in numbers.items():
            setattr(self.load, name, float(number))

    def page(self) -> str:
        """Return the page as it reads now."""
        self._count()
        return "\n".join(self._lines()) + "\n"

    async def drain(self, usual_s: float) -> None:
        """Take the usual time."""
        await asyncio.sleep(usual_s)

    def close(self) -> None:
        """Let go of nothing."""

    def _count(self) -> None:
        """Count what happened since the last time."""
        now, load = self._now(), self.load
        seconds, self._counted_at = now - self._counted_at, now
        requests = load.rps * seconds
        self._preemptions += load.preempted * seconds
        self._finished += requests
        self._prompt += requests * load.prompt
        self._output += requests * load.output
        # Each step gives every running request one token.
        steps = requests * load.output / max(1.0, load.running)
        for name, value, times in (
            ("time_to_first_token_seconds", load.ttft, requests),
            ("inter_token_latency_seconds", load.itl, requests * max(0.0, load.output - 1)),
            ("e2e_request_latency_seconds", load.ttft + load.itl * max(0.0, load.output - 1), requests),
            ("request_queue_time_seconds", load.queue, requests),
            ("request_prompt_tokens", load.prompt, requests),
            ("request_generation_tokens", load.output, requests),
            ("iteration_tokens_total", max(1.0, load.running), steps),
        ):
            self._histograms[name].observe(value, times)

    def _lines(self) -> Iterator[str]:
        yield "# TYPE process_start_time_seconds gauge"
        yield f"process_start_time_seconds {self._started_at!r}"
        yield from self._scalar("gauge", "num_requests_running", self.load.running)
        yield from self._scalar("gauge", "num_requests_waiting", self.load.waiting)
        yield from self._scalar("gauge", "kv_cache_usage_perc", self.load.kv)
        yield from self._scalar("counter", "num_preemptions_total", self._preemptions)
        yield from self._scalar("counter", "prompt_tokens_total", self._prompt)
        yield from self._scalar("counter", "prompt_tokens_cached_total", 0.0)
        yield from self._scalar("counter", "generation_tokens_total", self._output)
        yield from self._scalar("counter", "request_success_total", self._finished, 'finished_reason="stop",')
        for name, histogram in self._histograms.items():
            yield f"# TYPE vllm:{name} histogram"
            for bound, count in zip(histogram.bounds, histogram.counts, strict=True):
                yield f'vllm:{name}_bucket{{engine="0",le="{bound}",{self._model}}} {count}'
            yield f'vllm:{name}_bucket{{engine="0",le="+Inf",{self._model}}} {histogram.total}'
            yield f'vllm:{name}_count{{engine="0",{self._model}}} {histogram.total}'
            yield f'vllm:{name}_sum{{engine="0",{self._model}}} {histogram.sum}'
        yield "# TYPE vllm:cache_config_info gauge"
        yield f'vllm:cache_config_info{{block_size="{BLOCK_TOKENS}",engine="0",num_gpu_blocks="{self._blocks}"}} 1.0'

    def _scalar(self, kind: str, name: str, value: float, labels: str = "") -> tuple[str, str]:
        return f"# TYPE vllm:{name} {kind}", f'vllm:{name}{{engine="0",{labels}{self._model}}} {value}'


class EngineServer:
    """Serves an engine's page at an address.

    `POST /fake` with a JSON object of numbers sets parts of the load; other names in it go to `told`.
    """

    def __init__(self, engine: Engine, told: Callable[[dict[str, object]], None]) -> None:
        self._engine = engine
        self._told = told
        self._runner: web.AppRunner | None = None

    async def start(self, address: str, port: int) -> None:
        """Listen."""
        app = web.Application()
        app.add_routes(
            [
                web.get("/metrics", self._metrics),
                web.get("/health", self._health),
                web.get("/v1/models", self._models),
                web.post("/fake", self._fake),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, address, port).start()

    async def drain(self, usual_s: float) -> None:
        """Return when the engine may end; see there."""
        await self._engine.drain(usual_s)

    async def stop(self) -> None:
        """Close, connections in use included, and the engine with it."""
        self._engine.close()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _metrics(self, _: web.Request) -> web.Response:
        await asyncio.sleep(self._engine.load.hang)
        return web.Response(text=self._engine.page(), headers={"Content-Type": CONTENT_TYPE})

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=int(self._engine.load.health))

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": self._engine.model, "object": "model"}]})

    async def _fake(self, request: web.Request) -> web.Response:
        wishes = await request.json()
        known = {part.name for part in fields(Load)}
        self._engine.change(**{name: value for name, value in wishes.items() if name in known})
        self._told({name: value for name, value in wishes.items() if name not in known})
        return web.json_response({})
