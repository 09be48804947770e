"""Recording and reading back: bytes per pod and tick, microseconds a tick, on generated traffic.

The traffic is that of a busy fleet of reasoning models, 16 requests a second of 1,500 tokens over 20 pods: every
counter and every histogram of almost every pod moves on every tick.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np

from autoscaler.core.signals import COLUMN, ENGINE_COLUMNS
from autoscaler.core.types import (
    Decision,
    Demand,
    EngineKey,
    Engines,
    Floats,
    Forecast,
    Gpu,
    HistogramRows,
    Hold,
    Mode,
    Outcome,
    Part,
    Pod,
    Proposal,
    Reason,
    Score,
    Snapshot,
    TargetStatus,
)
from autoscaler.trace import Recorder, read_trace

_START = 1764500000.0
_INTERVAL_S = 5.0
_REFRESH_TICKS = 3
_REQUESTS = 4
_TOKENS = 1500
_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_ITL = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_E2E = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0)
# name, bounds as vLLM 0.32 has them, median [s], logarithmic deviation
_HISTOGRAMS = (
    ("ttft", (*_TTFT, 160.0, 640.0, 2560.0, np.inf), 0.25, 0.8),
    ("itl", (*_ITL, np.inf), 0.032, 0.35),
    ("e2e", (*_E2E, 1920.0, 7680.0, np.inf), 45.0, 0.8),
    ("queue_time", (*_E2E, 1920.0, 7680.0, np.inf), 0.05, 2.0),
)


class Fleet:
    """Generates the snapshots of a fleet under steady random traffic. A fake: no engine model, no queue, no scaling."""

    def __init__(self, pods: int, seed: int = 1) -> None:
        self._chance = np.random.default_rng(seed)
        names = [f"chat-7d4b9c6f5-{self._word(5)}" for _ in range(pods)]
        uids = sorted(f"{self._word(8)}-{self._word(4)}-{self._word(4)}-{self._word(12)}" for _ in names)
        owned = tuple(
            Pod(name=name, uid=uid, ip=f"10.0.0.{index}", node=f"gpu-{index}", created_at=_START - 900.0)
            for index, (name, uid) in enumerate(zip(names, uids, strict=True))
        )
        self._target = TargetStatus(
            namespace="serving", name="chat", current_replicas=pods, ready_replicas=pods, pods=owned
        )
        self._keys = tuple(EngineKey(uid) for uid in uids)
        self._gpus = tuple(Gpu(uuid=f"GPU-{uid}", pod_uid=uid, memory_used=0.0, memory_free=0.0) for uid in uids)
        self._values = np.full((pods, len(ENGINE_COLUMNS)), np.nan)
        self._values[:, COLUMN["started_at"]] = _START - 850.0
        self._values[:, COLUMN["kv_capacity_tokens"]] = 411_824.0
        self._values[:, COLUMN["gpu_memory_utilization"]] = 0.9
        self._values[:, COLUMN["num_preemptions"] :] = 0.0
        self._rows = np.arange(pods)
        self._counts = [np.zeros((pods, len(bounds))) for _, bounds, _, _ in _HISTOGRAMS]

    def snapshots(self, count: int) -> Iterator[Snapshot]:
        """Yield this many ticks."""
        for index in range(count):
            at = _START + index * _INTERVAL_S
            histograms = self._advance(at)
            if index % _REFRESH_TICKS == 0:
                self._gpus = tuple(self._refreshed(gpu) for gpu in self._gpus)
            engines = Engines(keys=self._keys, values=self._values.copy(), histograms=histograms)
            yield Snapshot(at=at, target=self._target, engines=engines, gpus=self._gpus)

    def _advance(self, at: float) -> dict[str, tuple[HistogramRows, ...]]:
        pods = len(self._keys)
        finished = self._chance.poisson(_REQUESTS, pods).astype(np.float64)
        tokens = self._chance.poisson(_REQUESTS * _TOKENS, pods).astype(np.float64)
        self._gauges(at, pods)
        for name, gain in (
            ("prompt_tokens", finished * 1000 + self._chance.integers(0, 999, pods)),
            ("cached_prompt_tokens", finished * 16 * self._chance.integers(5, 30, pods)),
            ("generation_tokens", tokens),
            ("requests_finished", finished),
            ("iterations", self._chance.integers(110, 160, pods).astype(np.float64)),
            ("itl_sum", tokens * self._chance.uniform(0.03, 0.035, pods)),
        ):
            self._values[:, COLUMN[name]] += gain
        histograms: dict[str, tuple[HistogramRows, ...]] = {}
        for index, (name, bounds, middle, spread) in enumerate(_HISTOGRAMS):
            observed = tokens if name == "itl" else finished
            self._counts[index] = self._counts[index] + self._observe(observed, bounds, middle, spread)
            histograms[name] = (HistogramRows(bounds=bounds, rows=self._rows, counts=self._counts[index]),)
        return histograms

    def _gauges(self, at: float, pods: int) -> None:
        delays_ms = self._chance.integers(4, 60, pods)
        self._values[:, COLUMN["read_at"]] = (round(at * 1000.0) + delays_ms) / 1000.0
        self._values[:, COLUMN["num_requests_running"]] = self._chance.poisson(80, pods)
        self._values[:, COLUMN["num_requests_waiting"]] = self._chance.poisson(2, pods)
        self._values[:, COLUMN["kv_cache_usage"]] = self._chance.integers(8000, 20_000, pods) / 25_739.0

    def _observe(self, observed: Floats, bounds: tuple[float, ...], middle: float, spread: float) -> Floats:
        rows = []
        for count in observed:
            seconds = self._chance.lognormal(np.log(middle), spread, int(count))
            rows.append(np.searchsorted(np.sort(seconds), bounds, side="right"))
        return np.array(rows, dtype=np.float64)

    def _refreshed(self, gpu: Gpu) -> Gpu:
        used = float(self._chance.integers(73_000, 73_200) * 2**20)
        busy = int(self._chance.integers(70, 100)) / 100.0
        return replace(gpu, memory_used=used, memory_free=81_559.0 * 2**20 - used, utilization=busy)

    def _word(self, length: int) -> str:
        return "".join(self._chance.choice(list("0123456789abcdef"), length))


def decision_for(snapshot: Snapshot) -> Decision:
    """Return a decision as full as real ones are, with numbers that move every tick. A fake: nothing is decided."""
    engines = snapshot.engines.values
    usage = float(engines[:, COLUMN["kv_cache_usage"]].mean())
    waiting = float(engines[:, COLUMN["num_requests_waiting"]].sum()) / (20.0 * len(engines))
    latency = float(engines[:, COLUMN["itl_sum"]].sum() % 1.0)
    parts = tuple(
        Part(name=name, weight=weight, value=value, shrink_value=value, driver=f"{driver} {value:.2f}")
        for name, weight, value, driver in (
            ("memory", 0.40, usage, "kv_cache_usage"),
            ("backlog", 0.35, waiting, "num_requests_waiting"),
            ("latency", 0.25, latency, "itl"),
        )
    )
    value = sum(part.weight * (part.value or 0.0) for part in parts)
    score = Score(value=value, shrink_value=value, known_weight=1.0, parts=parts, binds="memory", memory_guard=0.0)
    replicas = len(engines)
    return Decision(
        at=snapshot.at,
        score=score,
        demand=Demand(itl=replicas * usage, kv=replicas * usage * 0.7, sequences=replicas * latency),
        forecast=Forecast(
            horizon_s=185.0, level=replicas * usage, top=replicas * usage * 1.1, sigma=latency, up=9, keep=9
        ),
        proposal=Proposal(current=replicas, replicas=replicas, reason=Reason.HELD_HYSTERESIS, wished=replicas - 1),
        reason=Reason.HELD_HYSTERESIS,
        mode=Mode.NORMAL,
        action=Hold(),
        unblocks=(f"up: score {value:.3f} to reach 0.70", f"down: score {value:.3f} to fall to 0.40"),
    )


def measure(pods: int = 20, ticks: int = 600) -> list[tuple[str, str]]:
    """Return rows for the table: size, and the median time to write and to read one tick."""
    snapshots = list(Fleet(pods).snapshots(ticks))
    decisions = [decision_for(snapshot) for snapshot in snapshots]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl.gz"
        written = []
        with Recorder(path, "bench") as recorder:
            for snapshot, decision in zip(snapshots, decisions, strict=True):
                start = perf_counter()
                recorder.tick("chat", snapshot, decision, Outcome.UNCHANGED, 0.001)
                written.append(perf_counter() - start)
        size = path.stat().st_size / (pods * ticks)
        plain = median(_read(path, decisions=False) for _ in range(7)) / ticks
        full = median(_read(path, decisions=True) for _ in range(7)) / ticks
    return [
        ("recording, bytes per pod and tick (at most 150)", f"{size:.0f}"),
        ("recording, time a tick", f"{median(written) * 1e6:.0f} us"),
        ("reading a recording, time a tick", f"{plain * 1e6:.0f} us"),
        ("reading a recording with its decisions, time a tick", f"{full * 1e6:.0f} us"),
    ]


def _read(path: Path, *, decisions: bool) -> float:
    start = perf_counter()
    with read_trace(path, decisions=decisions) as events:
        for _ in events:
            pass
    return perf_counter() - start
