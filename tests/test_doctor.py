"""From facts to findings: what is a problem, what a warning, and what it says."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from autoscaler.core.policy import (
    Approval,
    BatchingMode,
    BatchingPolicy,
    Query,
    RolloutPolicy,
    Schedule,
    Signals,
    Slo,
    VllmSignals,
)
from autoscaler.core.signals import ENGINE_COLUMNS
from autoscaler.core.state import NO_ENGINES
from autoscaler.core.types import (
    Decision,
    Demand,
    Direction,
    Drain,
    EngineKey,
    Engines,
    Forecast,
    Gap,
    GapReason,
    Gpu,
    Hold,
    Mode,
    Pod,
    PodPhase,
    Proposal,
    Reason,
    Sample,
    ScaleReplicas,
    Snapshot,
    TargetStatus,
    Template,
)
from autoscaler.doctor import (
    STUCK,
    Finding,
    judge_batching,
    judge_cards,
    judge_decision,
    judge_drain,
    judge_failure,
    judge_models,
    judge_owners,
    judge_pages,
    judge_queries,
    judge_rights,
    judge_room,
    judge_signals,
    judge_target,
)
from tests.core.world import P0

AT = 1000.0
PODS = tuple(Pod(name=name, uid=f"uid-{name}", ip="10.1.0.5") for name in ("a", "b"))
CHAT = TargetStatus(namespace="serving", name="chat", current_replicas=2, ready_replicas=2, pods=PODS)


def levels(findings: Any) -> list[str]:
    return [str(finding.level) for finding in findings]


def a_snapshot(*read: str, target: TargetStatus = CHAT, **fields: Any) -> Snapshot:
    """Return a snapshot in which the engines of the pods with these uids were read."""
    keys = tuple(EngineKey(uid) for uid in sorted(read))
    engines = Engines(keys=keys, values=np.zeros((len(keys), len(ENGINE_COLUMNS)))) if keys else NO_ENGINES
    return Snapshot(at=AT, target=target, engines=engines, **fields)


# --- rights, target, owners -----------------------------------------------------------------------------------------

READ, SCALE = ("", "pods", "list"), ("apps", "deployments/scale", "patch")
HPA = ("autoscaling", "horizontalpodautoscalers", "list")


@pytest.mark.parametrize(
    ("allowed", "expected"),
    [
        pytest.param({READ: True, HPA: True}, ["ok"], id="all"),
        pytest.param({READ: False, HPA: True}, ["problem"], id="one is missing"),
        pytest.param({READ: True, HPA: False}, ["warning"], id="one that it works without"),
        pytest.param({READ: False, HPA: False, SCALE: False}, ["problem", "problem", "warning"], id="none"),
        pytest.param({READ: "unreachable", HPA: "unreachable"}, ["unknown"], id="no answer"),
        pytest.param({READ: "throttled", HPA: False}, ["unknown", "warning"], id="half an answer"),
    ],
)
def test_rights(allowed: Mapping[tuple[str, str, str], bool | str], expected: list[str]) -> None:
    assert sorted(levels(judge_rights(allowed, "serving"))) == sorted(expected)


def test_a_missing_right_comes_with_its_rule() -> None:
    allowed = dict.fromkeys([("", "pods", "list"), ("", "pods", "watch")], False)
    (finding,) = judge_rights(allowed, "serving")
    assert finding.text == "not granted in serving: list, watch pods"
    assert 'apiGroups: [""], resources: [pods], verbs: [list, watch]' in finding.remedy


@pytest.mark.parametrize(("needed", "level"), [(False, "warning"), (True, "problem")], ids=["proceed", "hold"])
def test_without_the_right_to_mark_pods_a_step_down_is_less_gentle_or_none(needed: bool, level: str) -> None:
    (finding,) = judge_rights({("", "pods", "patch"): False, READ: True}, "serving", marks_needed=needed)
    assert (finding.level, finding.text.partition(";")[0]) == (level, "not granted in serving: patch pods")
    assert 'apiGroups: [""], resources: [pods], verbs: [patch]' in finding.remedy


@pytest.mark.parametrize("reason", ["target_not_found", "forbidden", "unauthorized", "unreachable", "bad_body"])
def test_a_target_that_cannot_be_read_is_a_problem_with_a_remedy(reason: str) -> None:
    finding = judge_failure(reason, f"{reason}: detail")
    assert (finding.level, finding.text) == ("problem", f"{reason}: detail")
    assert finding.remedy


@pytest.mark.parametrize(
    ("target", "expected", "words"),
    [
        pytest.param(CHAT, ["ok"], "2 of 2 replicas ready, 1 to 8 allowed", id="good"),
        pytest.param(replace(CHAT, current_replicas=0), ["warning"], "at 0 replicas, which means paused", id="paused"),
        pytest.param(replace(CHAT, current_replicas=9), ["warning"], "outside 1 to 8", id="outside"),
        pytest.param(
            replace(CHAT, paused="autoscaler/paused is set"), ["ok", "warning"], "paused is set", id="annotated"
        ),
        pytest.param(replace(CHAT, pin=3), ["ok", "warning"], "pinned to 3", id="pinned"),
        pytest.param(replace(CHAT, direction=Direction.UP_ONLY), ["ok", "warning"], "direction up-only", id="one way"),
        pytest.param(
            replace(CHAT, rollout_unhealthy=True), ["ok", "warning"], "is under way whose pods fail", id="rollout"
        ),
        pytest.param(
            replace(CHAT, rollout_unhealthy=True, rollout_failed=True),
            ["ok", "warning"],
            "a rollout has failed",
            id="failed rollout",
        ),
        pytest.param(replace(CHAT, refused="exceeded quota: gpus"), ["ok", "warning"], "exceeded quota", id="quota"),
    ],
)
def test_target(target: TargetStatus, expected: list[str], words: str) -> None:
    findings = list(judge_target(P0, target))
    assert levels(findings) == expected
    assert words in findings[-1].text


def test_that_steps_wait_for_approval_is_said() -> None:
    *_, finding = judge_target(replace(P0, approval=Approval(required=True)), CHAT)
    assert (finding.level, finding.text) == ("ok", "each step waits for a person's approval; an Event tells its id")


def test_the_bounds_of_a_target_are_those_that_hold_now() -> None:
    night = Schedule(name="night", cron="0 1 * * *", duration_s=3600.0, max=1)
    (finding,) = judge_target(replace(P0, schedules=(night,)), CHAT, ("night",))
    assert "outside 1 to 1 by schedule night" in finding.text


@pytest.mark.parametrize(
    ("owner", "visible", "expected"),
    [
        pytest.param("", True, "ok", id="nobody"),
        pytest.param("", False, "unknown", id="not visible"),
        pytest.param("", None, "unknown", id="nobody looked"),
        pytest.param("HorizontalPodAutoscaler/chat", True, "problem", id="another autoscaler"),
    ],
)
def test_owners(owner: str, visible: bool | None, expected: str) -> None:
    finding = judge_owners(replace(CHAT, other_owner=owner), visible)
    assert finding.level == expected
    assert owner in finding.text


@pytest.mark.parametrize(
    ("writer", "words"),
    [("", "nobody else"), ("autoscaler", "nobody else"), ("helm", "helm did last")],
)
def test_who_wrote_the_replicas_last(writer: str, words: str) -> None:
    finding = judge_owners(replace(CHAT, scaled_by=writer), True)
    assert finding.level == "ok"
    assert words in finding.text


# --- signals --------------------------------------------------------------------------------------------------------


def page_gap(pod: str, reason: GapReason = GapReason.UNREACHABLE, signal: str = "*") -> Gap:
    return Gap(signal=signal, reason=reason, source="vllm", pod=pod, detail="connect refused")


LOADING = replace(CHAT, pods=(PODS[0], replace(PODS[1], ready=False)))
STARTING = replace(CHAT, pods=(replace(PODS[0], phase=PodPhase.PENDING, ready=False), replace(PODS[1], ready=False)))


@pytest.mark.parametrize(
    ("snapshot", "expected", "words"),
    [
        pytest.param(a_snapshot("uid-a", "uid-b"), "ok", "2 of 2 pods", id="all"),
        pytest.param(a_snapshot("uid-a", gaps=(page_gap("b"),)), "warning", "b (10.1.0.5): unreachable", id="one"),
        pytest.param(a_snapshot(gaps=(page_gap("a"), page_gap("b"))), "problem", "0 of 2 pods", id="none"),
        pytest.param(a_snapshot(), "problem", "a (10.1.0.5): no series of it", id="without a word"),
        pytest.param(a_snapshot("uid-a", target=LOADING), "ok", "1 of 1 pods", id="one still loads"),
        pytest.param(a_snapshot(target=STARTING), "unknown", "no pod is ready", id="all start"),
    ],
)
def test_pages(snapshot: Snapshot, expected: str, words: str) -> None:
    finding = judge_pages(VllmSignals(), snapshot)
    assert finding.level == expected
    assert words in finding.text


def test_many_pages_that_cannot_be_read_are_not_all_named() -> None:
    pods = tuple(Pod(name=f"p{number}", uid=f"u{number}") for number in range(200))
    finding = judge_pages(VllmSignals(), a_snapshot(target=replace(CHAT, pods=pods)))
    assert finding.text.endswith("; and 197 more")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        pytest.param(VllmSignals(port=8123), "signals.vllm.port (8123)", id="pages"),
        pytest.param(VllmSignals(prometheus="main"), "server main scrapes the pods", id="prometheus"),
    ],
)
def test_the_remedy_fits_the_way_they_are_read(settings: VllmSignals, words: str) -> None:
    assert words in judge_pages(settings, a_snapshot()).remedy


def test_signals_come_with_the_names_they_were_read_from() -> None:
    families = {("ttft", "vllm:ttft_bucket"): 3, ("kv", "vllm:kv"): 2, ("kv", "vllm:gpu_cache"): 1}
    gaps = (page_gap("a", GapReason.FAMILY_MISSING, "itl"), page_gap("b", GapReason.FAMILY_MISSING, "itl"))
    given, missing = judge_signals(a_snapshot(gaps=gaps), families)
    assert (given.level, missing.level) == ("ok", "warning")
    assert given.text == (
        "2 on 3 pages: kv (vllm:gpu_cache on 1 of them, vllm:kv on 2 of them), ttft (vllm:ttft_bucket)"
    )
    assert missing.text == "missing: itl family_missing x2"


def test_without_pages_there_is_nothing_to_say_of_signals() -> None:
    assert list(judge_signals(a_snapshot(gaps=(page_gap("a"),)), {})) == []
    assert list(judge_models("", {})) == []


@pytest.mark.parametrize(
    ("wanted", "models", "expected"),
    [
        pytest.param("", {"llama": 2}, "ok", id="no filter, one model"),
        pytest.param("", {"llama": 2, "qwen": 1}, "warning", id="no filter, two models"),
        pytest.param("llama", {"llama": 2, "qwen": 1}, "ok", id="filter"),
        pytest.param("lama", {"llama": 2, "qwen": 1}, "problem", id="filter that matches nothing"),
    ],
)
def test_models(wanted: str, models: Mapping[str, int], expected: str) -> None:
    (finding,) = judge_models(wanted, models)
    assert finding.level == expected
    assert all(f"{name} x{count}" in finding.text for name, count in models.items())


@pytest.mark.parametrize(
    ("owners", "target", "expected", "words"),
    [
        pytest.param(["uid-a", "uid-b", ""], CHAT, "ok", "cards of 2 of 2 ready pods; labels", id="all"),
        pytest.param(["uid-a", "uid-x"], CHAT, "warning", "cards of 1 of 2 ready pods", id="one"),
        pytest.param([""], CHAT, "warning", "cards of 0 of 2 ready pods; labels; no_pod_label", id="none"),
        pytest.param([], STARTING, "unknown", "no pod is ready", id="no pods"),
    ],
)
def test_cards(owners: list[str], target: TargetStatus, expected: str, words: str) -> None:
    gpus = tuple(Gpu(uuid=str(number), pod_uid=owner) for number, owner in enumerate(owners))
    gaps = () if expected == "ok" else (Gap(signal="*", reason=GapReason.NO_POD_LABEL, source="dcgm"),)
    finding = judge_cards(a_snapshot(target=target, gpus=gpus, gaps=gaps), ["dcgm"], ["labels"])
    assert finding.level == expected
    assert words in finding.text


QUERIES = replace(P0, signals=Signals(vllm=None, queries=(Query(signal="upstream_queue", query="sum(q)", server="x"),)))


def query_gap(reason: GapReason) -> Gap:
    return Gap(signal="upstream_queue", reason=reason, source="prometheus", detail="why")


@pytest.mark.parametrize(
    ("fields", "expected", "text"),
    [
        pytest.param(
            {"samples": (Sample(signal="upstream_queue", value=4.5, at=AT - 12.0),)},
            "ok",
            "upstream_queue = 4.5, 12 s old",
            id="value",
        ),
        pytest.param(
            {"samples": (Sample(signal="upstream_queue", value=0.0, at=AT + 1.0, partial=True),)},
            "ok",
            "upstream_queue = 0, 0 s old, partial",
            id="partial, and a clock that is ahead",
        ),
        pytest.param(
            {"gaps": (query_gap(GapReason.EMPTY),)}, "warning", "upstream_queue has no answer: empty: why", id="empty"
        ),
        pytest.param(
            {"gaps": (query_gap(GapReason.QUERY_ERROR),)},
            "problem",
            "upstream_queue has no answer: query_error: why",
            id="wrong",
        ),
        pytest.param({}, "warning", "upstream_queue has no answer: empty", id="without a word"),
    ],
)
def test_queries(fields: dict[str, Any], expected: str, text: str) -> None:
    (finding,) = judge_queries(QUERIES, a_snapshot(**fields))
    assert (finding.level, finding.text) == (expected, text)
    assert ("server x: sum(q)" in finding.remedy) == (expected != "ok")


# --- the pod template -----------------------------------------------------------------------------------------------


def a_template(*, gpus: Any = None, **spec: Any) -> Any:
    container: dict[str, Any] = {"name": "vllm"}
    container |= {"resources": {"limits": {"nvidia.com/gpu": gpus}}} if gpus is not None else {}
    sidecar = {"name": "sidecar", "image": "proxy"}
    return {"spec": {"containers": [sidecar, container], **spec}}


def test_c111_a_shrink_that_cuts_streams_is_said_with_its_numbers() -> None:
    no_hook, short = judge_drain(P0, Drain(drain_s=300.0))
    assert (no_hook.level, short.level) == ("warning", "warning")
    assert "no preStop" in no_hook.text
    assert short.text == (
        "terminationGracePeriodSeconds 30 < preStop 0 + --shutdown-timeout 300: SIGKILL comes 270 s early"
    )
    assert short.remedy == "set terminationGracePeriodSeconds above 300"


@pytest.mark.parametrize(
    ("drain", "words"),
    [
        pytest.param(Drain(grace_s=330.0, pre_stop_s=15.0, drain_s=300.0), [], id="good"),
        pytest.param(Drain(grace_s=315.0, pre_stop_s=15.0, drain_s=300.0), [], id="just enough"),
        pytest.param(Drain(grace_s=330.0, pre_stop_s=None, drain_s=300.0), [], id="unknown hook"),
        pytest.param(
            Drain(grace_s=300.0, pre_stop_s=15.0, drain_s=300.0), ["SIGKILL comes 15 s early"], id="hook takes the rest"
        ),
        pytest.param(Drain(grace_s=330.0, pre_stop_s=15.0), ["--shutdown-timeout is 0"], id="no drain"),
        pytest.param(Drain(grace_s=330.0, drain_s=300.0), ["no preStop"], id="no hook"),
        pytest.param(
            Drain(grace_s=330.0, pre_stop_s=15.0, drain_s=60.0),
            ["--shutdown-timeout 60 < slo.e2e 120"],
            id="shorter than the objective",
        ),
        pytest.param(Drain(), ["--shutdown-timeout is 0", "no preStop"], id="defaults"),
    ],
)
def test_drain(drain: Drain, words: list[str]) -> None:
    policy = replace(P0, slo=replace(P0.slo, e2e=Slo(seconds=120.0)))
    findings = list(judge_drain(policy, drain))
    assert levels(findings) == (["warning"] * len(words) or ["ok"])
    assert all(word in finding.text for word, finding in zip(words, findings, strict=bool(words)))


@pytest.mark.parametrize(
    ("required", "expected"),
    [
        pytest.param(False, "warning", id="warned of"),
        pytest.param(True, "problem", id="required"),
    ],
)
def test_c111_less_time_than_the_policy_asks_for(required: bool, expected: str) -> None:
    policy = replace(P0, scale_down=replace(P0.scale_down, drain_s=300.0, require_drain=required))
    first, *_ = judge_drain(policy, Drain(grace_s=30.0))
    assert (first.check, first.level) == ("drain", expected)
    assert "terminationGracePeriodSeconds 30 < preStop 0 + drain 300, --shutdown-timeout 0 < drain 300" in first.text
    good = Drain(grace_s=330.0, pre_stop_s=15.0, drain_s=300.0)
    assert levels(list(judge_drain(policy, good))) == ["ok"]


@pytest.mark.parametrize(
    ("limits", "expected", "words"),
    [
        pytest.param([64, 64], "ok", "--max-num-seqs 64", id="named"),
        pytest.param([None, None], "warning", "256 is assumed", id="not named"),
        pytest.param([64, 32], "warning", "32, 64; 32 counts", id="differ"),
        pytest.param([64, None], "warning", "64, and none; 64 counts", id="one does not"),
        pytest.param([], "unknown", "no pod", id="no pods"),
    ],
)
def test_batching(limits: list[int | None], expected: str, words: str) -> None:
    pods = tuple(Pod(name=str(number), uid=str(number), max_num_seqs=limit) for number, limit in enumerate(limits))
    finding = judge_batching(P0, replace(CHAT, pods=pods))
    assert finding.level == expected
    assert words in finding.text


@pytest.mark.parametrize(
    ("rollout", "template", "expected", "words"),
    [
        pytest.param(RolloutPolicy(), Template(recreate=True), "warning", "strategy Recreate", id="an obstacle"),
        pytest.param(RolloutPolicy(), Template(max_surge=1), "ok", "--max-num-seqs 64", id="none"),
        pytest.param(None, Template(recreate=True), "ok", "--max-num-seqs 64", id="not asked for"),
    ],
)
def test_what_speaks_against_a_rollout(
    rollout: RolloutPolicy | None, template: Template, expected: str, words: str
) -> None:
    policy = replace(P0, batching=BatchingPolicy(mode=BatchingMode.AUTO, rollout=rollout))
    finding = judge_batching(policy, replace(CHAT, pods=(Pod(name="a", uid="a", max_num_seqs=64),), template=template))
    assert finding.level == expected
    assert words in finding.text


def a_node(gpus: object = "8", *, ready: str = "True", cordoned: bool = False, **labels: str) -> dict[str, Any]:
    return {
        "metadata": {"labels": labels},
        "spec": {"unschedulable": True} if cordoned else {},
        "status": {"allocatable": {"nvidia.com/gpu": gpus}, "conditions": [{"type": "Ready", "status": ready}]},
    }


@pytest.mark.parametrize(
    ("gpus", "nodes", "expected", "words"),
    [
        pytest.param("2", [a_node(), a_node()], "ok", "16 nvidia.com/gpu on 2 nodes hold 8 replicas of 2", id="enough"),
        pytest.param(
            2, [a_node()], "warning", "hold 4 replicas of 2, others' pods left out; replicas.max is 8", id="few"
        ),
        pytest.param("3", [a_node("8"), a_node("1")], "warning", "9 nvidia.com/gpu on 2 nodes hold 2", id="rests"),
        pytest.param("8", [a_node("4"), a_node("4")], "problem", "hold 0 replicas of 8", id="no node is large enough"),
        pytest.param("1", [], "problem", "0 nvidia.com/gpu on 0 nodes", id="no nodes"),
        pytest.param("1", [a_node(ready="False")], "problem", "on 0 nodes", id="not ready"),
        pytest.param("1", [a_node(cordoned=True)], "problem", "on 0 nodes", id="cordoned"),
        pytest.param("1", [a_node(pool="cpu"), a_node(pool="h100")], "ok", "on 1 nodes", id="selector"),
        pytest.param("1", [a_node("many", pool="h100")], "problem", "0 nvidia.com/gpu on 1 nodes", id="not a number"),
        pytest.param(None, [], "ok", "pods ask for no nvidia.com/gpu", id="no cards"),
        pytest.param("1", "forbidden: nodes", "unknown", "cannot be told: forbidden: nodes", id="not allowed"),
    ],
)
def test_room(gpus: object, nodes: Any, expected: str, words: str) -> None:
    selector = {"pool": "h100"} if "pool" in str(nodes) else {}
    finding = judge_room(P0, a_template(gpus=gpus, nodeSelector=selector), nodes)
    assert finding.level == expected
    assert words in finding.text


def test_a_replica_of_two_pods_takes_twice_the_room() -> None:
    grouped = replace(P0, target=replace(P0.target, pods_per_replica=2))
    assert judge_room(P0, a_template(gpus="1"), [a_node()]).level == "ok"
    launch = Schedule(cron="0 0 1 9 *", duration_s=3600.0, max=40)
    assert (
        "the highest max of a schedule is 40"
        in judge_room(replace(P0, schedules=(launch,)), a_template(gpus="1"), [a_node()]).text
    )
    finding = judge_room(grouped, a_template(gpus="1"), [a_node()])
    assert (finding.level, "hold 4 replicas of 2" in finding.text) == ("warning", True)


# --- the decision ---------------------------------------------------------------------------------------------------


def a_decision(reason: Reason, action: Any) -> Decision:
    return Decision(
        at=AT,
        score=None,
        demand=Demand(),
        forecast=Forecast(horizon_s=1.0),
        proposal=Proposal(current=2, replicas=2, reason=reason),
        reason=reason,
        mode=Mode.NORMAL,
        action=action,
    )


@pytest.mark.parametrize(
    ("decision", "expected"),
    [
        pytest.param(
            a_decision(Reason.UP_BOUNDS, ScaleReplicas(seen=2, to=4)),
            Finding(check="decision", level="ok", text="scale 2 to 4: because"),  # type: ignore[arg-type]
            id="action",
        ),
        pytest.param(
            a_decision(Reason.STEADY, Hold()),
            Finding(check="decision", level="ok", text="hold: because"),  # type: ignore[arg-type]
            id="hold",
        ),
    ],
)
def test_a_good_decision(decision: Decision, expected: Finding) -> None:
    assert judge_decision(decision, "because") == expected


@pytest.mark.parametrize("reason", sorted(STUCK), ids=str)
def test_a_hold_that_will_not_pass_by_itself_is_a_warning(reason: Reason) -> None:
    finding = judge_decision(a_decision(reason, Hold()), "because")
    assert (finding.level, finding.text) == ("warning", "hold: because")
    assert reason in finding.remedy
