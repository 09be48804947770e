"""The score: readings folded into pressure, and which part of it binds."""

import math
from collections.abc import Mapping
from operator import itemgetter
from typing import NamedTuple

from autoscaler.core.facts import Facts
from autoscaler.core.histogram import quantile, share_within, slowest
from autoscaler.core.policy import MemorySource, Policy, Sizing, Slo, WithinSlo
from autoscaler.core.types import Attribution, GapReason, Gpu, Part, Sample, Score, Snapshot
from autoscaler.core.window import SUMS, FleetRow, Observations, observations, row_at, spanned_seconds

MIB = 1024.0 * 1024.0
MIN_FINISHED = 20.0
LOW_FREE_BYTES, LOW_FREE_SHARE, NO_FREE_BYTES = 1024.0 * MIB, 0.02, 256.0 * MIB
DeviceKey = tuple[str, str, str]


def clip(value: float) -> float:
    """Return the value pulled into [0, 1]."""
    if not value > 0.0:
        return 0.0
    return min(1.0, value)


class Evidence(NamedTuple):
    """All that the score reads, besides the snapshot.

    Args:
        facts: this tick's load and supply.
        rows, times: the fleet's rows and their times, oldest first, this tick's last.
        recent: the fleet's row one score window ago, the oldest one when history is shorter; None with one row only.
        increase: what the fleet's sums grew by since `recent`, by `SUMS`.
        plateaus: for each device the lowest use [bytes] since its pod became ready.
        guard: the out-of-memory guard HR in [0, 1]; None without a device whose memory is known.
        first_token_age_s: seconds since a first token was seen anywhere; None when never.
        pending_pods: Pending pods beyond those that we ordered.
    """

    facts: Facts
    rows: tuple[FleetRow, ...]
    times: tuple[float, ...]
    recent: FleetRow | None
    increase: list[float] | None
    plateaus: Mapping[DeviceKey, float]
    guard: float | None
    first_token_age_s: float | None
    pending_pods: int


def row_before(rows: tuple[FleetRow, ...], times: tuple[float, ...], seconds: float) -> FleetRow | None:
    """Return the fleet's row `seconds` ago, the oldest one when history is shorter; None with one row only."""
    if len(rows) < 2:
        return None
    return rows[max(0, min(row_at(times, times[-1] - seconds), len(rows) - 2))]


def score_snapshot(policy: Policy, snapshot: Snapshot, evidence: Evidence) -> Score:
    """Return the weighted pressure S = sum(w s) / sum(w) over the known parts, and what binds it."""
    samples = {sample.signal: sample for sample in snapshot.samples}
    weights, guard = policy.score.weights, evidence.guard
    memory = _memory(policy, snapshot, evidence, samples, guard)
    backlog = _backlog(policy, evidence, samples)
    latency = _latency(policy, evidence, samples)
    parts = (
        memory.part("memory", weights.memory),
        backlog.part("backlog", weights.backlog),
        latency.part("latency", weights.latency),
    )
    weighing = [part for part in parts if part.weight > 0.0]
    known = [part for part in weighing if part.value is not None]
    known_weight = math.fsum([part.weight for part in known])
    pulls = [part.weight * (part.value or 0.0) for part in known]
    value = None
    if known and known_weight >= policy.score.min_known_weight - 1e-9:
        value = math.fsum(pulls) / known_weight
    shrinks = [part.weight * part.shrink_value for part in weighing if part.shrink_value is not None]
    shrink_value = None
    if len(shrinks) == len(weighing):
        shrink_value = math.fsum(shrinks) / math.fsum([part.weight for part in weighing])
    return Score(
        value=value,
        shrink_value=shrink_value,
        known_weight=known_weight,
        parts=parts,
        binds=known[pulls.index(max(pulls))].name if known else "",
        memory_guard=guard,
        degraded=latency.degraded,
    )


class Level(NamedTuple):
    """One input's level in [0, 1]: for growth, for shrinking, in words, and why something is missing.

    Args:
        clear: what holds a shrink by itself, where that is not `shrink`.
    """

    growth: float | None = None
    shrink: float | None = None
    driver: str = ""
    gap: GapReason | None = None
    degraded: bool = False
    clear: float | None = None

    def part(self, name: str, weight: float) -> Part:
        """Return it as a part of the score."""
        return Part(
            name=name,
            weight=weight,
            value=self.growth,
            shrink_value=self.shrink,
            driver=self.driver,
            gap=self.gap,
            clear_value=self.clear,
        )


# --- memory ---------------------------------------------------------------------------------------------------------


def memory_guard(gpus: tuple[Gpu, ...], plateaus: Mapping[DeviceKey, float], reserved: float | None) -> float | None:
    """Return the out-of-memory guard HR in [0, 1], the worst device's; None without a device whose memory is known."""
    worst = None
    for gpu in gpus:
        used, free = gpu.memory_used, gpu.memory_free
        if used is not None and free is not None:
            # What the engine holds at rest: what it reserves at start, or the lowest use seen.
            base = plateaus.get((gpu.uuid, gpu.instance, gpu.pod_uid), used)
            if reserved is not None and gpu.attribution is Attribution.EXCLUSIVE:
                base = max(base, reserved * (used + free))
            level = guard_level(used, free, base)
            worst = level if worst is None else max(worst, level)
    return worst


def guard_level(used: float, free: float, base: float) -> float:
    """Return max(growth past the base, shortage of free memory), in [0, 1].

    Growth h = (U - B) / (T - B) counts from a half; free memory from max(1 GiB, 2 % of the card) down to 256 MiB.
    Worked: U 80000, F 1273, B 75142 MiB: h = 4858 / 6131 = 0.792, level 0.585.
    """
    total = used + free
    growth = (used - base) / (total - base) if total > base else 0.0
    low = max(LOW_FREE_BYTES, LOW_FREE_SHARE * total)
    return clip(max((growth - 0.5) / 0.5, (low - free) / (low - NO_FREE_BYTES)))


def _memory(
    policy: Policy, snapshot: Snapshot, evidence: Evidence, samples: Mapping[str, Sample], guard: float | None
) -> Level:
    """Return M = max(KV, PRE, oomWeight x HR)."""
    settings = policy.score.memory
    brake = settings.oom_weight * guard if guard is not None else 0.0
    if settings.source is MemorySource.FRAMEBUFFER:
        return _framebuffer(snapshot, evidence, samples)
    growth, shrink, gap = _kv(evidence, samples)
    if growth is None:
        coarse = guard is not None or "gpu_memory_ratio" in samples
        return Level(gap=GapReason.MEMORY_COARSE if coarse else gap)
    preempted = _preemption(policy, evidence)
    driver, level, shown = max(
        ("kv_cache_usage", clip(growth / settings.kv_full), growth),
        ("preemptions", preempted, preempted),
        ("memory_guard", brake, guard or 0.0),
        key=itemgetter(1),
    )
    shrunk = None if shrink is None else max(clip(shrink / settings.kv_full), preempted, brake)
    return Level(growth=level, shrink=shrunk, driver=f"{driver} {shown:.2f}", gap=gap)


def _kv(evidence: Evidence, samples: Mapping[str, Sample]) -> tuple[float | None, float | None, GapReason | None]:
    sample = samples.get("kv_cache_usage")
    if sample is not None:
        return sample.value, None if sample.partial else sample.value, GapReason.PARTIAL if sample.partial else None
    return evidence.facts.kv.growth, evidence.facts.kv.shrink, evidence.facts.kv.gap


def _preemption(policy: Policy, evidence: Evidence) -> float:
    """Return c(preemptions / max(finished, 20) / full): small samples stay quiet."""
    full = policy.score.memory.preemption_full
    if full <= 0.0 or evidence.increase is None:
        return 0.0
    preempted, finished = evidence.increase[SUMS["num_preemptions"]], evidence.increase[SUMS["requests_finished"]]
    return clip(preempted / max(finished, MIN_FINISHED) / full)


def _framebuffer(snapshot: Snapshot, evidence: Evidence, samples: Mapping[str, Sample]) -> Level:
    """Return c((ratio - base) / (0.95 - base)), for servers that have no KV gauge; it never vouches for shrinking."""
    sample = samples.get("gpu_memory_ratio")
    levels = [clip(sample.value / 0.95)] if sample is not None else []
    for gpu in snapshot.gpus:
        if gpu.memory_used is None or gpu.memory_free is None or gpu.memory_used + gpu.memory_free <= 0.0:
            continue
        total = gpu.memory_used + gpu.memory_free
        base = min(0.9, evidence.plateaus.get((gpu.uuid, gpu.instance, gpu.pod_uid), gpu.memory_used) / total)
        levels.append(clip((gpu.memory_used / total - base) / (0.95 - base)))
    if not levels:
        return Level(gap=GapReason.EMPTY)
    return Level(growth=max(levels), driver=f"gpu_memory_ratio level {max(levels):.2f}", gap=GapReason.MEMORY_COARSE)


# --- backlog --------------------------------------------------------------------------------------------------------


def _backlog(policy: Policy, evidence: Evidence, samples: Mapping[str, Sample]) -> Level:
    """Return B, the largest (or the weighted sum) of the waiting requests, the queueing time and the upstream queue."""
    settings, facts = policy.score.backlog, evidence.facts
    sample = samples.get("num_requests_waiting")
    waiting = sample.value if sample is not None else facts.waiting
    partial = sample is not None and sample.partial
    upstream = samples.get("upstream_queue")
    if waiting is None and upstream is None:
        return Level(gap=GapReason.EMPTY)
    wait_s = _queue_wait(policy, evidence, samples, waiting)
    terms = _backlog_terms(policy, evidence, waiting, wait_s, upstream)
    if settings.combine == "weighted":
        shares = dict(zip(("waiting", "pending", "wait"), settings.weights, strict=True))
        value = clip(math.fsum(shares[name] * terms.get(name, (0.0, ""))[0] for name in shares))
        driver = max(terms, key=lambda name: shares.get(name, 0.0) * terms[name][0])
    else:
        driver = max(terms, key=lambda name: terms[name][0])
        value = terms[driver][0]
    # Pods without data count as fully loaded when shrinking.
    share = facts.missing / facts.expected if facts.expected and sample is None else 0.0
    shrink: float | None = value + (1.0 - value) * share
    gap = None
    if partial or (upstream is not None and upstream.partial):
        shrink, gap = None, GapReason.PARTIAL
    elif waiting is None or (upstream is None and _asks_for(policy, "upstream_queue")):
        shrink, gap = None, GapReason.EMPTY
    return Level(growth=value, shrink=shrink, driver=terms[driver][1], gap=gap)


def _asks_for(policy: Policy, signal: str) -> bool:
    return signal in [query.signal for query in policy.signals.queries]


def _backlog_terms(
    policy: Policy, evidence: Evidence, waiting: float | None, wait_s: float | None, upstream: Sample | None
) -> dict[str, tuple[float, str]]:
    """Return each term in [0, 1] with its reading in words."""
    settings, ready = policy.score.backlog, evidence.facts.ready
    terms: dict[str, tuple[float, str]] = {"waiting": (0.0, "waiting 0")}
    if waiting is not None:
        level = 0.0
        if settings.waiting_per_replica is not None:
            full = settings.waiting_per_replica * ready
            level = clip(waiting / full) if full > 0.0 else float(waiting > 0.0)
        if settings.waiting_total is not None:
            level = max(level, clip(waiting / settings.waiting_total))
        terms["waiting"] = (level, f"waiting {waiting:.0f}")
    if settings.wait_s is not None and wait_s is not None:
        terms["wait"] = (clip(wait_s / settings.wait_s), f"queueing {wait_s:.1f}s")
    if upstream is not None:
        terms["upstream"] = (clip(upstream.value / settings.upstream), f"upstream queue {upstream.value:.0f}")
        if settings.waiting_per_replica is not None and ready > 0.0:
            total = upstream.value + (waiting or 0.0)
            terms["upstream"] = (
                max(terms["upstream"][0], clip(total / (settings.waiting_per_replica * ready))),
                terms["upstream"][1],
            )
    if settings.pending_pods is not None:
        pods = evidence.pending_pods
        terms["pending"] = (clip(pods / settings.pending_pods), f"pending pods {pods}")
    return terms


def _queue_wait(
    policy: Policy, evidence: Evidence, samples: Mapping[str, Sample], waiting: float | None
) -> float | None:
    """Return how long a request waits [s]: Little's law, or the p90 of queueing times if that is longer.

    vLLM observes queueing time when a request ends, so that a blocked queue shows nothing; waiting / (first tokens a
    second) covers that. Without first tokens it is the time since the last one.
    """
    sample = samples.get("queue_wait")
    if sample is not None:
        return sample.value
    if waiting is None:
        return None
    if waiting <= 0.0:
        return 0.0
    old, increase = evidence.recent, evidence.increase
    if old is None or increase is None:
        return None
    first_tokens = increase[SUMS["first_tokens"]]
    pods = increase[SUMS["expected"]] / increase[SUMS["ticks"]]
    seconds = spanned_seconds(evidence.rows[-1].at - old.at, increase[SUMS["spanned"]], pods)
    if first_tokens > 0.0:
        little = waiting * seconds / first_tokens
    elif evidence.first_token_age_s is not None:
        little = evidence.first_token_age_s
    else:
        little = seconds
    observed = observations(old, evidence.rows[-1], "queue_time")
    late = quantile(observed.bounds, observed.counts, 0.9).value if observed is not None else math.nan
    return max(little, late) if math.isfinite(late) else little


# --- latency --------------------------------------------------------------------------------------------------------


def _latency(policy: Policy, evidence: Evidence, samples: Mapping[str, Sample]) -> Level:
    """Return L = max over the objectives; degraded when an objective on a share is missed."""
    slo = policy.slo
    objectives = [
        _objective(policy, evidence, samples, name, objective)
        for name, objective in (("ttft", slo.ttft), ("itl", slo.itl), ("e2e", slo.e2e))
        if objective is not None
    ]
    if slo.within is not None:
        objectives.append(_share_objective(policy, evidence, samples, slo.within))
    degraded = any(objective.degraded for objective in objectives)
    known = [objective for objective in objectives if objective.growth is not None]
    shrinks = [objective.shrink for objective in objectives if objective.shrink is not None]
    gaps = [objective.gap for objective in objectives if objective.gap is not None]
    shrink, clear, gap = None, None, gaps[0] if gaps else None
    if len(shrinks) == len(objectives):
        shrink = max(shrinks)
        clear = max([one.shrink or 0.0 if one.clear is None else one.clear for one in objectives])
    if not known:
        return Level(shrink=shrink, gap=gap, degraded=degraded, clear=clear)
    worst = max(known, key=lambda objective: objective.growth or 0.0)
    return Level(growth=worst.growth, shrink=shrink, driver=worst.driver, gap=gap, degraded=degraded, clear=clear)


def _pace(policy: Policy, evidence: Evidence, slo: Slo) -> float | None:
    """Return the level of the mean ITL, which holds a shrink in place of its quantile; None where the quantile does.

    One chunk of somebody's prompt holds up every sequence of its engine: where that takes longer than the objective,
    p99 is above it at any number of replicas. How many keep the pace is demand's question, and its line may be wrong;
    a mean beyond the objective would say so. A policy that is sized by the score has only the quantile.
    """
    if policy.sizing is Sizing.SCORE or evidence.increase is None:
        return None
    seconds, gaps = evidence.increase[SUMS["itl_sum"]], evidence.increase[SUMS["itl_count"]]
    return _latency_level(policy, slo, seconds / gaps) if seconds > 0.0 and gaps > 0.0 else None


def _latency_level(policy: Policy, slo: Slo, seconds: float) -> float:
    """Return c((seconds / SLO - floor) / (1 - floor))."""
    floor = policy.score.latency.floor
    return clip((seconds / slo.seconds - floor) / (1.0 - floor))


def _objective(policy: Policy, evidence: Evidence, samples: Mapping[str, Sample], name: str, slo: Slo) -> Level:
    """Return the level of a quantile objective."""

    def level(seconds: float) -> float:
        return _latency_level(policy, slo, seconds)

    sample, clear = samples.get(name), _pace(policy, evidence, slo) if name == "itl" else None
    label = f"{name} p{100.0 * slo.quantile:g}"
    if sample is not None:
        gap = GapReason.PARTIAL if sample.partial else None
        value = level(sample.value)
        return Level(growth=value, shrink=None if gap else value, driver=f"{label} {sample.value:.2f}s", gap=gap)
    if evidence.facts.idle:
        return Level(growth=0.0, shrink=0.0, driver="idle")
    observed = _observations(policy, evidence, name)
    if isinstance(observed, GapReason):
        return Level(gap=observed)
    if observed.counts[-1] < policy.score.latency.min_observations:
        # Too few for a quantile; but if even the slowest was quick, that is evidence enough not to block a shrink.
        return Level(
            shrink=level(slowest(observed.bounds, observed.counts)),
            gap=GapReason.FEW_OBSERVATIONS,
            clear=clear,
        )
    found = quantile(observed.bounds, observed.counts, slo.quantile)
    if math.isnan(found.value):
        return Level(gap=GapReason.NO_INF_BUCKET)
    value = level(found.value)
    if name == "ttft" and policy.sizing is not Sizing.SCORE:
        # The prompts that take longer than the objective on an idle engine miss it at any number of replicas.
        lenient = max(slo.quantile / 2.0, 2.0 * slo.quantile - 1.0)
        clear = level(quantile(observed.bounds, observed.counts, lenient).value)
    return Level(
        growth=value,
        shrink=1.0 if found.censored else value,
        driver=f"{label} {'>= ' if found.censored else ''}{found.value:.2f}s",
        clear=clear,
    )


def _share_objective(policy: Policy, evidence: Evidence, samples: Mapping[str, Sample], within: WithinSlo) -> Level:
    """Return the level of a share objective: 0.5 at the target share, 1 at twice the allowed misses."""

    def judged(share: float, partial: bool) -> Level:
        value = clip((1.0 - share) / (1.0 - within.share) / 2.0) if within.share < 1.0 else float(share < 1.0)
        return Level(
            growth=value,
            shrink=None if partial else value,
            driver=f"{within.metric} within {within.seconds:g}s {100.0 * share:.1f}%",
            gap=GapReason.PARTIAL if partial else None,
            degraded=share < within.share,
        )

    sample = samples.get("within")
    if sample is not None:
        return judged(sample.value, sample.partial)
    if evidence.facts.idle:
        return Level(growth=0.0, shrink=0.0, driver="idle")
    observed = _observations(policy, evidence, within.metric)
    if isinstance(observed, GapReason):
        return Level(gap=observed)
    if observed.counts[-1] < policy.score.latency.min_observations:
        quick = slowest(observed.bounds, observed.counts) <= within.seconds
        gap = GapReason.FEW_OBSERVATIONS
        return Level(shrink=0.0 if quick else 1.0, gap=gap)
    return judged(share_within(observed.bounds, observed.counts, within.seconds), partial=False)


def _observations(policy: Policy, evidence: Evidence, name: str) -> Observations | GapReason:
    """Return the window's observations, widened while they are few; why there are none."""
    settings, seconds, old = policy.score.latency, policy.score.window_s, evidence.recent
    latest = evidence.rows[-1] if evidence.rows else None
    if latest is None or name not in latest.histograms:
        return GapReason.FAMILY_MISSING
    while old is not None:
        found = observations(old, latest, name)
        if found is None:
            return GapReason.FAMILY_MISSING
        if found.counts[-1] >= settings.min_observations or seconds >= settings.max_window_s:
            return found if found.counts[-1] > 0.0 else GapReason.NO_OBSERVATIONS
        seconds = min(2.0 * seconds, settings.max_window_s)
        old = row_before(evidence.rows, evidence.times, seconds)
    return GapReason.NO_HISTORY
