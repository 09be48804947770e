"""From a recording of the live daemon to what `simulate` takes: a profile, the traffic, and how long pods start."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from autoscaler.core.model import SCALE, observations
from autoscaler.core.policy import StepTime
from autoscaler.core.signals import COLUMN, ENGINE_COUNTERS
from autoscaler.core.types import Engines, Floats, Snapshot
from autoscaler.core.window import EngineMemory, Increase, look_over, remember_engines
from autoscaler.errors import AutoscalerError
from autoscaler.sim.profile import Profile
from autoscaler.sim.workload import Lengths

MIN_ROWS = 20
SPAN_S = 60.0
"""Length of the spans of the traffic's curve."""
WINDOW_S = 60.0
"""An engine seen for the first time counts all that it did, when it started within this time."""
_COUNTER = {signal.name: index for index, signal in enumerate(ENGINE_COUNTERS)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The traffic of a span.

    Args:
        at: its beginning, seconds from the start of the recording.
        rps: arrivals a second.
        prompt, output: mean tokens of a request.
    """

    at: float
    rps: float
    prompt: float
    output: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Starts:
    """What pods took from creation to Ready.

    Args:
        count: starts in the recording.
        median_s: of them. sigma: standard deviation of their logarithm; 0 below two.
    """

    count: int
    median_s: float
    sigma: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What a recording says.

    Args:
        line: the step-time line. rows: observations behind it. mape: mean error over them, as a share.
        batch: mean decoding sequences an iteration. prompt: mean prompt tokens of a request.
        kv_tokens: the smallest KV cache of an engine. max_num_seqs: from the pods; None where they do not say.
        starts: None without any.
        traffic: span by span.
    """

    line: StepTime
    rows: int
    mape: float
    batch: float
    prompt: float
    kv_tokens: int
    max_num_seqs: int | None
    starts: Starts | None
    traffic: tuple[Span, ...]


class Calibrator:
    """Takes in the snapshots of one target, in order, and then says what they come to."""

    def __init__(self) -> None:
        self._memory: EngineMemory | None = None
        self._design: list[Floats] = []
        self._seconds: list[Floats] = []
        self._began = math.nan
        self._spans: dict[int, list[float]] = {}
        self._last_at = math.nan
        self._waiting = 0.0
        self._starts: dict[str, float] = {}
        self._capacity = math.inf
        self._max_num_seqs: int | None = None

    def add(self, snapshot: Snapshot) -> None:
        """Take in one tick."""
        at, engines, pods = snapshot.at, snapshot.engines, snapshot.target.pods
        if math.isnan(self._began):
            self._began = at
        self._memory, _, increase = remember_engines(
            self._memory, engines, look_over(engines.values), ("ttft",), at, WINDOW_S, pods
        )
        design, seconds = observations(engines.values, increase)
        self._design.append(design)
        self._seconds.append(seconds)
        self._count(at, engines, increase)
        for pod in pods:
            if pod.ready and pod.ready_at is not None and pod.created_at >= self._began:
                self._starts.setdefault(pod.uid, pod.ready_at - pod.created_at)
            self._max_num_seqs = pod.max_num_seqs or self._max_num_seqs
        capacity = engines.values[:, COLUMN["kv_capacity_tokens"]]
        self._capacity = min(self._capacity, float(np.fmin.reduce(capacity, initial=np.inf)))

    def _count(self, at: float, engines: Engines, increase: Increase) -> None:
        """Add the tick's arrivals and tokens to its span: what had its first token, and what the queues grew by."""
        histogram = increase.histograms.get("ttft")
        first_tokens = float(histogram.counts[-1]) if histogram is not None else 0.0
        counters = np.nansum(increase.counters, axis=0)
        waiting = float(np.nansum(engines.values[:, COLUMN["num_requests_waiting"]]))
        sums = self._spans.setdefault(int((at - self._began) // SPAN_S), [0.0] * 5)
        prompted, generated = counters[_COUNTER["prompt_tokens"]], counters[_COUNTER["generation_tokens"]]
        elapsed = 0.0 if math.isnan(self._last_at) else at - self._last_at
        added = (elapsed, first_tokens + waiting - self._waiting, first_tokens, float(prompted), float(generated))
        for index, value in enumerate(added):
            sums[index] += value
        self._last_at, self._waiting = at, waiting

    def finish(self) -> Calibration:
        """Return what was seen. Raises AutoscalerError, when that is too little."""
        design = np.concatenate([np.empty((0, 4)), *self._design])
        seconds = np.concatenate([np.empty(0), *self._seconds])
        if len(seconds) < MIN_ROWS:
            raise AutoscalerError(
                f"only {len(seconds)} readings of an engine that was busy throughout; a profile takes {MIN_ROWS}"
            )
        if not math.isfinite(self._capacity):
            raise AutoscalerError("no engine says how many tokens its KV cache holds")
        line = fit(design, seconds)
        predicted = design @ np.array([line.c0, line.cp, line.cb, line.ck])
        total = np.sum(list(self._spans.values()), axis=0)
        prompt, output = total[3] / max(total[2], 1.0), total[4] / max(total[2], 1.0)
        return Calibration(
            line=line,
            rows=len(seconds),
            mape=float(np.mean(np.abs(predicted / seconds - 1.0))),
            batch=float(np.mean(design[:, 2])),
            prompt=float(prompt),
            kv_tokens=int(self._capacity),
            max_num_seqs=self._max_num_seqs,
            starts=_starts(self._starts),
            traffic=tuple(
                Span(
                    at=index * SPAN_S,
                    rps=max(0.0, arrived / elapsed),
                    prompt=prompted / first_tokens if first_tokens > 0.0 else prompt,
                    output=generated / first_tokens if first_tokens > 0.0 else output,
                )
                for index, (elapsed, arrived, first_tokens, prompted, generated) in sorted(self._spans.items())
                if elapsed > 0.0
            ),
        )


def _starts(seconds: Mapping[str, float]) -> Starts | None:
    took = np.array([value for value in seconds.values() if value > 0.0])
    if not len(took):
        return None
    sigma = float(np.std(np.log(took), ddof=1)) if len(took) > 1 else 0.0
    return Starts(count=len(took), median_s=float(np.median(took)), sigma=sigma)


def fit(design: Floats, seconds: Floats) -> StepTime:
    """Return the non-negative line of least relative squares: rows of (1, prefill, sequences, resident) an iteration.

    The most negative coefficient is set to 0 and the rest solved again, until none is negative.
    """
    left, right = design * SCALE / seconds[:, None], np.ones(len(seconds))
    free = [0, 1, 2, 3]
    while True:
        found = np.zeros(4)
        found[free] = np.linalg.lstsq(left[:, free], right, rcond=None)[0]
        lowest = int(np.argmin(found))
        if found[lowest] >= 0.0:
            c0, cp, cb, ck = (found * SCALE).tolist()
            return StepTime(c0=c0, cp=cp, cb=cb, ck=ck)
        free.remove(lowest)


def calibrate(snapshots: Iterable[Snapshot]) -> Calibration:
    """Return what the snapshots of one target say, in the order of time. Raises AutoscalerError, when too little."""
    calibrator = Calibrator()
    for snapshot in snapshots:
        calibrator.add(snapshot)
    return calibrator.finish()


MIN_STARTS = 5
"""Fewer do not say how much starts differ."""


def to_profile(calibration: Calibration, like: Profile, name: str) -> Profile:
    """Return the profile whose iterations take what the line says.

    The profile's iteration is max-like in weights and tokens, the line a sum: `token_s` is chosen so that both give the
    same time to the prefill that the mean prompt token is part of, or to the token budget where that is smaller. The
    attention of a prompt to itself is in there. What no recording says is `like`'s: GPUs, the token budget, the block
    size, and the cold start where no pod started.
    """
    line, starts = calibration.line, calibration.starts
    # Half of all prompt tokens come in long prompts: of lognormal ones exp(sigma^2) times the mean.
    prefill = calibration.prompt * math.exp(Lengths().prompt_sigma ** 2)
    chunk = max(1.0, min(prefill, like.max_num_batched_tokens - calibration.batch))
    base = max(line.c0, 1e-6)
    token = ((base + line.cp * chunk) ** 4 - base**4) ** 0.25 / (chunk + calibration.batch)
    return replace(
        like,
        name=name,
        base_s=base,
        token_s=token,
        sequence_s=line.cb,
        context_s=line.ck,
        prefix_s=0.0,
        overhead=1.0,
        kv_tokens=calibration.kv_tokens,
        max_num_seqs=calibration.max_num_seqs or like.max_num_seqs,
        cold_start_s=starts.median_s if starts is not None else like.cold_start_s,
        cold_start_sigma=starts.sigma if starts is not None and starts.count >= MIN_STARTS else like.cold_start_sigma,
    )


def profile_text(profile: Profile, calibration: Calibration, source: str) -> str:
    """Return the profile as the YAML that `--profile` takes.

    Args:
        source: the recording's name.
    """
    starts = calibration.starts
    cold = (
        f"median of {starts.count} starts, standard deviation of the logarithm {starts.sigma:.2f}"
        if starts is not None
        else "no pod started in the recording: this is the other profile's"
    )
    sigma = "" if profile.cold_start_sigma is None else f"\n  sigma: {profile.cold_start_sigma:.3g}"
    return f"""\
# {profile.name}, from {source}
model: {profile.model}
gpus: {profile.gpus}
stepTime:  # from {calibration.rows} readings of busy engines
  baseMs: {profile.base_s * 1e3:.4g}
  tokenUs: {profile.token_s * 1e6:.4g}
  sequenceUs: {profile.sequence_s * 1e6:.4g}
  contextNs: {profile.context_s * 1e9:.4g}
  prefixPs: 0  # of prompts of {calibration.prompt:.0f} tokens on average, it is in tokenUs
  overhead: 1
kvCache:
  tokens: {profile.kv_tokens}
  blockSize: {profile.block_size}
limits:
  maxNumSeqs: {profile.max_num_seqs}
  maxNumBatchedTokens: {profile.max_num_batched_tokens}  # no recording says: set it to what the engines run with
coldStart:
  medianSeconds: {profile.cold_start_s:.4g}  # {cold}{sigma}
source: calibrated from {source}
fit:
  mapePercent: {100 * calibration.mape:.2g}
"""


def traffic_text(calibration: Calibration) -> str:
    """Return the traffic as the CSV of a rate curve with mean lengths, which `simulate` takes as a workload."""
    rows = (f"{span.at:.0f},{span.rps:.4f},{span.prompt:.1f},{span.output:.1f}" for span in calibration.traffic)
    return "\n".join(("t_s,rps,input_tokens,output_tokens", *rows)) + "\n"
