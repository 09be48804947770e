"""What would stop a policy from working: from facts of its cluster to findings. `cli.doctor` gathers the facts."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from autoscaler.core.policy import Policy, VllmSignals
from autoscaler.core.rollout import obstacle
from autoscaler.core.types import (
    FIELD_MANAGER,
    WHOLE_PAGE,
    Decision,
    Direction,
    Drain,
    Gap,
    GapReason,
    Pod,
    PodPhase,
    Reason,
    ScaleReplicas,
    Snapshot,
    TargetStatus,
)

Json = Mapping[str, Any]
Right = tuple[str, str, str]
"""API group, resource with its subresource, verb."""

GPU = "nvidia.com/gpu"
SHOWN = 3
PASSING = frozenset(
    {
        GapReason.EMPTY,
        GapReason.STALE,
        GapReason.NON_FINITE,
        GapReason.NO_OBSERVATIONS,
        GapReason.NO_READY_PODS,
        GapReason.PARTIAL,
        GapReason.TRANSIENT,
    }
)
"""Why a good query may have no answer for now: no traffic yet, a server that restarts."""
STUCK = frozenset(
    {
        Reason.NO_DATA,
        Reason.INSUFFICIENT_COMPONENTS,
        Reason.NO_READY_PODS,
        Reason.GROUP_SIZE,
        Reason.SCALED_TO_ZERO,
        Reason.PAUSED,
        Reason.OTHER_OWNER,
        Reason.WRITER_CONFLICT,
        Reason.UNSCHEDULABLE,
        Reason.QUOTA,
        Reason.ROLLOUT_UNHEALTHY,
        Reason.UNSAFE_DRAIN,
        Reason.HEALTH_FUSE,
    }
)
"""Reasons of a hold that somebody has to do something about."""


class Level(StrEnum):
    """How bad a finding is. UNKNOWN is what could not be looked at: neither good nor bad."""

    OK = "ok"
    UNKNOWN = "unknown"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at.

    Args:
        check: what was looked at, one word.
        text: what was seen.
        remedy: what to do; "" where there is nothing to do.
    """

    check: str
    level: Level
    text: str
    remedy: str = ""


def ok(check: str, text: str) -> Finding:
    """Return that it is good."""
    return Finding(check=check, level=Level.OK, text=text)


def unknown(check: str, text: str, remedy: str = "") -> Finding:
    """Return that it could not be looked at."""
    return Finding(check=check, level=Level.UNKNOWN, text=text, remedy=remedy)


def warning(check: str, text: str, remedy: str) -> Finding:
    """Return that it makes the policy work less well."""
    return Finding(check=check, level=Level.WARNING, text=text, remedy=remedy)


def problem(check: str, text: str, remedy: str) -> Finding:
    """Return that it stops the policy from working."""
    return Finding(check=check, level=Level.PROBLEM, text=text, remedy=remedy)


# --- rights ---------------------------------------------------------------------------------------------------------

DISPENSABLE: Mapping[str, str] = {
    "horizontalpodautoscalers": "another autoscaler of this target would not be noticed",
    "events": "no Events are written; the log has the same",
}
"""Resources without which the policy works, and what is missing then."""


UNMARKED = "no pod is marked before a step down: Kubernetes takes the newest"


VITAL: Mapping[str, str] = {"leases": "no daemon comes to lead, and none writes"}
"""What is missing without the right to a resource, where that is not plain."""


def judge_rights(
    allowed: Mapping[Right, bool | str], namespace: str, *, marks_needed: bool = False, check: str = "rights"
) -> Iterator[Finding]:
    """Yield what is granted and what is not.

    Args:
        allowed: the answer for each right that is needed, or why there was none.
        marks_needed: without marked pods there is no step down.
        check: what is looked at.
    """
    unanswered = sorted({answer for answer in allowed.values() if isinstance(answer, str)})
    if unanswered:
        yield unknown(check, f"the API server does not say what is granted: {unanswered[0]}")
    missing = [right for right, answer in sorted(allowed.items()) if answer is False]
    granted = sum(answer is True for answer in allowed.values())
    if granted == len(allowed):
        yield ok(check, f"all {granted} that are needed are granted in {namespace}")
    grouped: dict[tuple[str, str], list[str]] = {}
    for group, resource, verb in missing:
        grouped.setdefault((group, resource), []).append(verb)
    for (group, resource), verbs in grouped.items():
        text = f"not granted in {namespace}: {', '.join(verbs)} {resource}"
        grant = f'apiGroups: ["{group}"], resources: [{resource}], verbs: [{", ".join(verbs)}]'
        remedy = f"bind the Roles of deploy/ to this account; the rule is {grant}"
        lost = DISPENSABLE.get(resource, "")
        if (resource, verbs) == ("pods", ["patch"]) and not marks_needed:
            lost, remedy = UNMARKED, f"add deploy/components/gentle to this account's rights; the rule is {grant}"
        if lost:
            yield warning(check, f"{text}; {lost}", remedy)
        else:
            vital = f"; {VITAL[resource]}" if resource in VITAL else ""
            yield problem(check, f"{text}{vital}", remedy)


# --- target and owners ----------------------------------------------------------------------------------------------

TARGET_REMEDIES: Mapping[str, str] = {
    "target_not_found": "create the Deployment, or correct target.namespace and target.deployment",
    "forbidden": "grant what is missing; see rights",
    "unauthorized": "check the token or login command of the kubeconfig, or the pod's service account",
    "unreachable": "check the API server's address, and the network between here and there",
    "throttled": "wait, and ask again",
}


def judge_failure(reason: str, text: str) -> Finding:
    """Return that the target cannot be read at all."""
    return problem("target", text, TARGET_REMEDIES.get(reason, "see the message"))


def judge_target(policy: Policy, status: TargetStatus, active: Collection[str] = ()) -> Iterator[Finding]:
    """Yield what the Deployment's size says.

    Args:
        active: labels of the schedules that are active now.
    """
    name, size, bounds = f"{status.namespace}/{status.name}", status.current_replicas, policy.bounds(active)
    by = f" by schedule {', '.join(bounds.by)}" if bounds.by else ""
    seen = f"{name}: {status.ready_replicas} of {size} replicas ready"
    if size == 0:
        yield warning("target", f"{name} is at 0 replicas, which means paused", "set at least 1 to begin")
    elif not bounds.min <= size <= bounds.max:
        text = f"{seen}, outside {bounds.min} to {bounds.max}{by}: the first action brings them inside"
        yield warning("target", text, "correct replicas.min and replicas.max if this is not meant")
    else:
        yield ok("target", f"{seen}, {bounds.min} to {bounds.max} allowed{by}")
    if policy.approval.required:
        yield ok("target", "each step waits for a person's approval; an Event tells its id")
    if status.paused:
        yield warning("target", f"paused: {status.paused}", "remove or mend the annotation")
    elif status.pin is not None or status.direction is not Direction.BOTH:
        wishes = f"direction {status.direction}" if status.pin is None else f"pinned to {status.pin}"
        yield warning("target", f"{wishes} by an annotation", "remove it if it is not meant any more")
    if status.rollout_unhealthy:
        what = "a rollout has failed" if status.rollout_failed else "a rollout is under way whose pods fail"
        yield warning("target", f"{what}: replicas are not added", "fix or roll back the revision")
    if status.refused:
        yield warning(
            "target", f"pods are refused: {status.refused}", "raise the quota, or mend what admission refuses"
        )


def judge_owners(status: TargetStatus, hpa_visible: bool | None) -> Finding:
    """Return whether somebody else writes the replicas.

    Args:
        hpa_visible: whether HorizontalPodAutoscalers can be listed; None where nobody tried.
    """
    if status.other_owner:
        text = f"{status.other_owner} writes the replicas too: the policy yields to it and does nothing"
        return problem("owners", text, "remove one of the two")
    if hpa_visible is not True:
        return unknown("owners", "HorizontalPodAutoscalers cannot be listed", "grant list horizontalpodautoscalers")
    if status.scaled_by in ("", FIELD_MANAGER):
        return ok("owners", "nobody else writes the replicas")
    return ok("owners", f"no autoscaler writes the replicas; {status.scaled_by} did last")


# --- signals --------------------------------------------------------------------------------------------------------


def judge_pages(vllm: VllmSignals, snapshot: Snapshot) -> Finding:
    """Return which pods' engines could be read. Pods that still load have no page yet."""
    read = {key.pod_uid for key in snapshot.engines.keys}
    running = [pod for pod in snapshot.target.pods if pod.phase is PodPhase.RUNNING and not pod.terminating]
    good = [pod for pod in running if pod.uid in read]
    bad = [pod for pod in running if pod.uid not in read and pod.ready]
    if not good and not bad:
        return unknown("engines", "no pod is ready: there is no page to read", "ask again when one is")
    seen = f"{len(good)} of {len(good) + len(bad)} pods give engine metrics"
    if not bad:
        return ok("engines", seen)
    shown = "; ".join(f"{pod.name} ({pod.ip}): {_why_unread(pod, snapshot.gaps)}" for pod in bad[:SHOWN])
    more = f"; and {len(bad) - SHOWN} more" if len(bad) > SHOWN else ""
    if vllm.prometheus is not None:
        remedy = (
            f"check that the server {vllm.prometheus} scrapes the pods and labels its series with pod and namespace"
        )
    else:
        remedy = (
            f"check signals.vllm.port ({vllm.port}), .path and .scheme, and that the network lets us reach the pods"
        )
    return (warning if good else problem)("engines", f"{seen}; {shown}{more}", remedy)


def _why_unread(pod: Pod, gaps: Iterable[Gap]) -> str:
    """Return why a pod's page could not be used."""
    ours = [gap for gap in gaps if gap.source == "vllm" and gap.signal == WHOLE_PAGE and gap.pod in (pod.name, "")]
    return next((f"{gap.reason} {gap.detail}".rstrip() for gap in ours), "no series of it")


def judge_signals(snapshot: Snapshot, families: Mapping[tuple[str, str], int]) -> Iterator[Finding]:
    """Yield which signals the engines' pages give.

    Args:
        families: pods by signal and the sample name that it was read from.
    """
    if families:
        pages = max(families.values())
        named: dict[str, list[str]] = {}
        for (signal, name), count in sorted(families.items()):
            named.setdefault(signal, []).append(name if count == pages else f"{name} on {count} of them")
        shown = ", ".join(f"{signal} ({', '.join(names)})" for signal, names in named.items())
        yield ok("signals", f"{len(named)} on {pages} pages: {shown}")
    missing = Counter(
        (gap.signal, gap.reason) for gap in snapshot.gaps if gap.source == "vllm" and gap.signal != WHOLE_PAGE
    )
    if missing:
        shown = ", ".join(f"{signal} {reason} x{count}" for (signal, reason), count in sorted(missing.items()))
        remedy = "see docs/reasons.md; the engine may be of a version without them, or have statistics switched off"
        yield warning("signals", f"missing: {shown}", remedy)


def judge_models(wanted: str, models: Mapping[str, int]) -> Iterator[Finding]:
    """Yield how the filter by model fits the names on the pages.

    Args:
        wanted: `signals.vllm.modelName`; "" for no filter.
        models: pods by model name.
    """
    if not models:
        return
    shown = ", ".join(f"{name} x{count}" for name, count in sorted(models.items()))
    if wanted and wanted not in models:
        yield problem(
            "model", f"no page has the model {wanted!r}; there are: {shown}", "correct signals.vllm.modelName"
        )
    elif wanted:
        yield ok("model", f"{wanted} on {models[wanted]} pages; the pages have: {shown}")
    elif len(models) > 1:
        remedy = "set signals.vllm.modelName if only one of them is this policy's"
        yield warning("model", f"several models count together: {shown}", remedy)
    else:
        yield ok("model", f"every series counts: {shown}")


def judge_cards(snapshot: Snapshot, sources: Sequence[str], reports: Sequence[str]) -> Finding:
    """Return whether device memory can be attributed to the target's pods.

    Args:
        sources: names of the configured ones, `dcgm` or `nvml`.
        reports: how the exporters label workloads, one line each.
    """
    check = "cards"
    live = {pod.uid for pod in snapshot.target.pods if pod.ready}
    pods = {gpu.pod_uid for gpu in snapshot.gpus} & live
    gaps = sorted({f"{gap.reason} {gap.detail}".rstrip() for gap in snapshot.gaps if gap.source in sources})
    seen = "; ".join([f"cards of {len(pods)} of {len(live)} ready pods", *reports, *gaps[:SHOWN]])
    if not live:
        return unknown(check, "no pod is ready: no card to attribute", "ask again when one is")
    if pods == live:
        return ok(check, seen)
    remedy = "the out-of-memory guard is blind there: check the address, and that the exporter labels pods"
    return warning(check, seen, remedy)


def judge_queries(policy: Policy, snapshot: Snapshot) -> Iterator[Finding]:
    """Yield each query's value and age, or why there is none."""
    samples = {sample.signal: sample for sample in snapshot.samples}
    for query in policy.signals.queries:
        gap = next((one for one in snapshot.gaps if (one.source, one.signal) == ("prometheus", query.signal)), None)
        sample = samples.get(query.signal)
        if sample is not None:
            age_s = max(0.0, snapshot.at - sample.at)
            partial = ", partial" if sample.partial else ""
            yield ok("queries", f"{query.signal} = {sample.value:g}, {age_s:.0f} s old{partial}")
            continue
        reason = gap.reason if gap is not None else GapReason.EMPTY
        detail = f": {gap.detail}" if gap is not None and gap.detail else ""
        text = f"{query.signal} has no answer: {reason}{detail}"
        remedy = f"run it by hand on the server {query.server}: {query.query}"
        yield (warning if reason in PASSING else problem)("queries", text, remedy)


# --- the pod template -----------------------------------------------------------------------------------------------


def judge_drain(policy: Policy, drain: Drain) -> Iterator[Finding]:
    """Yield what a pod that is taken away cannot finish."""
    check, slowest, settings = "drain", policy.slo.e2e, policy.scale_down
    good = True
    lacking = "" if settings.drain_s is None else drain.lacks(settings.drain_s)
    if lacking:
        good = False
        remedy = "give the pods that time in the template, or lower scaleDown.drain"
        if settings.require_drain:
            yield problem(check, f"{lacking}: scaleDown.requireDrain forbids every shrink", remedy)
        else:
            yield warning(check, f"{lacking}: a shrink may cut requests", remedy)
    if drain.drain_s == 0.0:
        good = False
        text = "--shutdown-timeout is 0: every shrink cuts the requests that the pod runs"
        yield warning(check, text, "add --shutdown-timeout N to the engine's args (vLLM 0.18), N >= p99 of e2e latency")
    elif slowest is not None and drain.drain_s < slowest.seconds:
        good = False
        text = f"--shutdown-timeout {drain.drain_s:g} < slo.e2e {slowest.seconds:g}: a shrink cuts good requests"
        yield warning(check, text, f"set --shutdown-timeout to at least {slowest.seconds:g}")
    if drain.pre_stop_s == 0.0:
        good = False
        remedy = "add a preStop sleep of some 15 s, so that routers notice first"
        yield warning(check, "there is no preStop: requests still arrive at a pod that ends", remedy)
    if drain.short_s > 0:
        good = False
        text = f"{drain}: SIGKILL comes {drain.short_s:g} s early"
        yield warning(check, text, f"set terminationGracePeriodSeconds above {drain.needed_s:g}")
    if good:
        yield ok(check, str(drain))


def judge_batching(policy: Policy, status: TargetStatus) -> Finding:
    """Return whether the pods' arguments say how many sequences an engine runs at once, and may be changed."""
    check, limits = "batching", {pod.max_num_seqs for pod in status.pods}
    if policy.batching.rolls_out and status.template is not None:
        against = obstacle(status.template)
        if against is not None:
            return warning(
                check, f"no rollout of limits can begin: {against[1]}", f"see {against[0]} in docs/reasons.md"
            )
    if not limits:
        return unknown(check, "no pod to read --max-num-seqs from", "ask again when one is there")
    said = sorted(limit for limit in limits if limit is not None)
    if not said:
        text = f"the pods' arguments do not name --max-num-seqs: {policy.demand.max_num_seqs} is assumed"
        return warning(check, text, "name it in the args, or set demand.maxNumSeqs to what the engine's log says")
    if len(limits) > 1:
        shown = ", ".join(map(str, said)) + (", and none" if None in limits else "")
        return warning(check, f"pods differ in --max-num-seqs: {shown}; {said[0]} counts", "end the rollout")
    return ok(check, f"--max-num-seqs {said[0]}")


def judge_room(policy: Policy, template: Json, nodes: Sequence[Json] | str) -> Finding:
    """Return whether the nodes' GPUs could hold `replicas.max`.

    A pod needs its GPUs on one node. Taints, affinity, quota and what other pods hold are not looked at.

    Args:
        nodes: the cluster's; or why they cannot be listed.
    """
    check, spec = "room", _dict(template.get("spec"))
    gpus = sum(_gpus(_dict(one)) for one in spec.get("containers") or ())
    if gpus == 0:
        return ok(check, f"pods ask for no {GPU}")
    if isinstance(nodes, str):
        text = f"{gpus} {GPU} a pod; what nodes have cannot be told: {nodes}"
        return unknown(check, text, "grant list nodes (a ClusterRole) to the account that asks, or ask as another")
    selector = _dict(spec.get("nodeSelector")).items()
    fit = [
        node
        for node in nodes
        if _is_usable(node) and selector <= _dict(_dict(node.get("metadata")).get("labels")).items()
    ]
    free = [_count(_dict(_dict(node.get("status")).get("allocatable")).get(GPU)) for node in fit]
    pods = sum(count // gpus for count in free)
    group, bounds = policy.target.pods_per_replica, policy.replicas
    seen = (
        f"{sum(free)} {GPU} on {len(fit)} nodes hold {pods // group} replicas of {gpus * group}, others' pods left out"
    )
    remedy = "add nodes, or lower the bound; a cluster autoscaler may add them by itself"
    if pods < bounds.min * group:
        return problem(check, f"{seen}; replicas.min is {bounds.min}", remedy)
    most = policy.most_replicas
    text = f"{seen}; {'replicas.max' if most == bounds.max else 'the highest max of a schedule'} is {most}"
    return ok(check, text) if pods >= most * group else warning(check, text, remedy)


def _gpus(container: Json) -> int:
    """Return a container's GPUs: limits and requests of extended resources are equal, and either may be left out."""
    resources = _dict(container.get("resources"))
    return max(_count(_dict(resources.get(part)).get(GPU)) for part in ("limits", "requests"))


def _is_usable(node: Json) -> bool:
    """Return whether pods may be put on the node: ready, and not cordoned."""
    conditions = _dict(node.get("status")).get("conditions") or ()
    ready = any(one.get("type") == "Ready" and one.get("status") == "True" for one in map(_dict, conditions))
    return ready and not _dict(node.get("spec")).get("unschedulable")


# --- the decision ---------------------------------------------------------------------------------------------------


def judge_decision(decision: Decision, explained: str) -> Finding:
    """Return what a daemon that starts now would decide first.

    Args:
        explained: the decision in one line.
    """
    if isinstance(decision.action, ScaleReplicas):
        return ok("decision", f"scale {decision.action.seen} to {decision.action.to}: {explained}")
    if decision.reason in STUCK:
        return warning("decision", f"hold: {explained}", f"see {decision.reason} in docs/reasons.md")
    return ok("decision", f"hold: {explained}")


def _count(value: object) -> int:
    """Return a whole quantity; 0 for what is none."""
    return int(str(value)) if str(value).isdecimal() else 0


def _dict(value: object) -> Json:
    return value if isinstance(value, dict) else {}
