"""NVIDIA Dynamo's planner for one pool, and the plainer planner by token work.

Both are told more than they would know: the profile instead of a learned regression, and true answer lengths of the
interval instead of those of the answers that ended.

Source: Dynamo main of November 2026, components/src/dynamo/planner: core/throughput_scaling.py, core/load_scaling.py,
core/perf_model/agg.py, config/defaults.py. Its default predictor, ARIMA, is not modelled; `constant` and `kalman` are.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from autoscaler.sim.profile import Profile
from autoscaler.sim.profiles import profile
from bench.rivals import capacity
from bench.rivals.base import Bounds, tuned
from bench.rivals.lengths import Lengths
from bench.rivals.predictors import Constant, Kalman, Predictor
from bench.rivals.view import Increase, Page, View, by_pod
from bench.work import request_work

DEFAULT_PROFILE = profile("llama-3.1-70b-h100x4")
LOAD_S = 5.0
"""load_adjustment_interval"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamoSettings:
    """Args:
    profile: stands for the vendor's profiling run.
    ttft_s, itl_s: objectives; the vendor's are 0.5 s and 50 ms.
    utilization: share of the profiled rate that is planned with.
    interval_s: of throughput scaling.
    sensitivity: share of an objective that must hold for one replica less, in load scaling.
    predictor: of rate and lengths.
    throughput, load: the modes; with both, throughput is a floor.
    """

    profile: Profile = DEFAULT_PROFILE
    ttft_s: float = 0.5
    itl_s: float = 0.05
    utilization: float = tuned(1.0, 0.4, 1.2)
    throughput_s: float = 180.0
    sensitivity: float = tuned(0.8, 0.3, 0.95)
    predictor: Literal["constant", "kalman"] = "constant"
    throughput: bool = True
    load: bool = False
    bounds: Bounds = field(default_factory=Bounds)

    def build(self) -> "Dynamo":
        """Return the rival."""
        return Dynamo(self)

    def planned(self, rate: float, prompt: float, output: float) -> int:
        """Return the replicas for a rate of requests of these mean lengths."""
        found = capacity.best(self.profile, prompt, output, self.ttft_s, self.itl_s)
        return math.ceil(rate / (found.rate * self.utilization) - 1e-9)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """One engine as load scaling sees it: tokens of prompts that wait, sequences and their context."""

    queued: float
    batch: float
    context: float


class Dynamo:
    """Throughput scaling every three minutes, load scaling every five seconds, or the latter above the former."""

    def __init__(self, settings: DynamoSettings) -> None:
        self.settings = settings
        self.interval_s = LOAD_S
        self._lengths = Lengths(settings.throughput_s)
        self._predictors: tuple[Predictor, ...] = tuple(_predictor(settings.predictor) for _ in range(3))
        self._prefill = Increase(settings.throughput_s)
        self._next: float | None = None
        self._floor: int | None = None

    def desired(self, now: float, view: View) -> int:
        """Return the replicas after this tick; before the first full interval the count stays."""
        self._lengths.add(now, view.gateway)
        self._prefill.add(now, by_pod(view.active, _iterations))
        if self._next is None:
            self._next = now + self.settings.throughput_s
        if now >= self._next:
            self._next += self.settings.throughput_s
            self._plan()
        wanted = view.ordered
        if self.settings.load:
            wanted = max(self._by_load(view), self._floor or 0)
        elif self._floor is not None:
            wanted = self._floor
        return self.settings.bounds.clip(wanted)

    def _plan(self) -> None:
        """Predict the next interval, and set the replicas for it."""
        seen = (float(self._lengths.requests), self._lengths.prompt, self._lengths.output)
        for predictor, value in zip(self._predictors, seen, strict=True):
            if value is not None:
                predictor.add(value)
        requests, prompt, output = (predictor.next() for predictor in self._predictors)
        if not self.settings.throughput or requests is None or prompt is None or output is None:
            return
        rate = max(0.0, requests) / self._lengths.seconds
        self._floor = self.settings.planned(rate, max(1.0, prompt), max(1.0, output))

    # -- load scaling --------------------------------------------------------------------------------------------

    def _by_load(self, view: View) -> int:
        """Return one replica more where every engine misses an objective, one fewer where the rest could take it."""
        current = view.ordered
        loads = self._loads(view)
        if not loads or len(loads) != current:
            return current  # observing only, while replicas start or stop
        ttft, itl = self._ttfts(loads), self._itls(loads)
        if min(ttft) > self.settings.ttft_s or min(itl) > self.settings.itl_s:
            return current + 1
        return current - 1 if current > 1 and self._could_take(loads) else current

    def _loads(self, view: View) -> list[EngineLoad]:
        prompt = self._lengths.prompt or 0.0
        tokens = self.settings.profile.kv_tokens
        return [
            EngineLoad(queued=page.waiting * prompt, batch=page.running, context=page.kv_usage * tokens)
            for page in view.pages
        ]

    def _ttfts(self, loads: Sequence[EngineLoad]) -> list[float]:
        prompt, profile = self._lengths.prompt or 0.0, self.settings.profile
        return [capacity.next_ttft(profile, one.queued, prompt, one.batch, one.context) for one in loads]

    def _itls(self, loads: Sequence[EngineLoad]) -> list[float]:
        prompt, profile = self._lengths.prompt or 0.0, self.settings.profile
        grown = self._prefill.total()
        prefill = grown[0] / grown[1] if grown and grown[1] > 0.0 else 0.0
        return [capacity.iteration(profile, prefill, one.batch, one.context, prompt) for one in loads]

    def _could_take(self, loads: Sequence[EngineLoad]) -> bool:
        """Tell whether one replica fewer would keep within the sensitivity, with its load on the others."""
        settings, factor = self.settings, len(loads) / (len(loads) - 1)
        after = [
            EngineLoad(queued=one.queued * factor, batch=one.batch * factor, context=one.context * factor)
            for one in loads
        ]
        own = self._ttfts([EngineLoad(queued=0.0, batch=one.batch, context=one.context) for one in after])
        queueing = [total - alone for total, alone in zip(self._ttfts(after), own, strict=True)]
        budgets = [(settings.ttft_s - alone) * settings.sensitivity for alone in own]
        filled = [
            EngineLoad(queued=0.0, batch=one.batch, context=one.context + one.queued) for one in after
        ]  # what waits ends up in the cache
        return (
            all(extra < budget for extra, budget in zip(queueing, budgets, strict=True))
            and all(one.context < settings.profile.kv_tokens for one in filled)
            and all(itl < settings.itl_s * settings.sensitivity for itl in self._itls(filled))
        )


def _iterations(page: Page) -> tuple[float, ...]:
    return (float(page.prompt_tokens), float(page.iterations))


def _predictor(name: Literal["constant", "kalman"]) -> Predictor:
    return Constant() if name == "constant" else Kalman()


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenWorkSettings:
    """A planner that divides the work of the last interval's arrivals by a share of what a replica can do.

    No vendor's: the simplest feed-forward on tokens, and the hardest to beat where prefill binds.
    """

    profile: Profile = DEFAULT_PROFILE
    utilization: float = tuned(0.72, 0.4, 0.95)
    planning_s: float = tuned(180.0, 60.0, 600.0)
    bounds: Bounds = field(default_factory=Bounds)

    def build(self) -> "TokenWork":
        """Return the rival."""
        return TokenWork(self)


class TokenWork:
    """Replicas by arriving work, booked at arrival, at mean lengths."""

    def __init__(self, settings: TokenWorkSettings) -> None:
        self.settings = settings
        self.interval_s = settings.planning_s
        self._lengths = Lengths(settings.planning_s)

    def desired(self, now: float, view: View) -> int:
        """Return the replicas for the next interval; after the first call the count stays."""
        self._lengths.add(now, view.gateway)
        rate, prompt, output = self._lengths.rate, self._lengths.prompt, self._lengths.output
        if rate is None:
            return self.settings.bounds.clip(view.ordered)
        if prompt is None or output is None:
            return self.settings.bounds.min
        prefill, decode = request_work(self.settings.profile, np.array([prompt]), np.array([output]))
        busy = rate * float(prefill[0] + decode[0])
        return self.settings.bounds.clip(math.ceil(busy / self.settings.utilization - 1e-9))
