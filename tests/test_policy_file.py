"""Reading policy files: what is taken, what is refused and in which words."""

import copy
import json
import os
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscaler.core.policy import BatchingMode, Policy, StepTime
from autoscaler.errors import PolicyError, Problem
from autoscaler.policy_file import (
    Loaded,
    json_schema,
    load_policies,
    parse_bool,
    parse_duration,
    parse_policies,
    parse_quantity,
    policy_from_plain,
    policy_to_plain,
)

BASE: dict[str, Any] = {
    "apiVersion": "autoscaler/v1alpha1",
    "kind": "ScalingPolicy",
    "metadata": {"name": "chat"},
    "spec": {"target": {"namespace": "serving", "deployment": "chat-a"}, "replicas": {"min": 1, "max": 8}},
}
HEAD = "apiVersion: autoscaler/v1alpha1\nkind: ScalingPolicy\nmetadata: {name: chat}\n"
SPEC = "spec:\n  target: {namespace: serving, deployment: chat-a}\n  replicas: {min: 1, max: 8}\n"


def document(spec: str = "") -> str:
    """Return a policy with these lines, in flow or block style, added to its spec."""
    return HEAD + SPEC + "".join(f"  {line}\n" for line in spec.splitlines())


def one(text: str) -> Policy:
    (policy,) = parse_policies(text, "chat.yaml").policies.values()
    return policy


def problems(text: str) -> tuple[Problem, ...]:
    with pytest.raises(PolicyError) as caught:
        parse_policies(text, "chat.yaml")
    return caught.value.problems


def only(text: str) -> Problem:
    (problem,) = problems(text)
    return problem


# --- scalars --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("500m", "0.5"),
        ("1Gi", "1073741824"),
        ("1G", "1000000000"),
        ("0.2Gi", "214748364.8"),
        ("131e6", "131000000"),
        ("130023424", "130023424"),
        ("1610612736000m", "1610612736"),
        ("1E", "1000000000000000000"),
        ("1E3", "1000"),
        ("1Ei", "1152921504606846976"),
        ("60u", "0.00006"),
        ("40n", "0.00000004"),
        ("2k", "2000"),
        ("1Ki", "1024"),
        ("-1.5", "-1.5"),
        ("+2", "2"),
        (".5", "0.5"),
        ("5.", "5"),
        ("0.1", "0.1"),
        ("9007199254740993", "9007199254740993"),
    ],
)
def test_c133_kubernetes_quantities_are_exact(text: str, expected: str) -> None:
    assert parse_quantity(text) == Decimal(expected)


@pytest.mark.parametrize(
    "text",
    [
        "6GiB",
        "1gi",
        "",
        "--1",
        "1 Gi",
        "1K",
        "1KI",
        "e3",
        "1e",
        "1.2.3",
        "1,5",
        "0x10",
        "1_000",
        "٣",
        "1e9999",
        "NaN",
        "inf",
    ],
)
def test_c133_what_is_no_quantity_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="must be a number"):
        parse_quantity(text)


def test_c133_quantities_are_taken_by_every_number_key() -> None:
    policy = one(
        document(
            'demand: {maxNumSeqs: "1Ki", prior: {c0: 15m, cp: 60u, cb: 20e-6, ck: 40n}}\n'
            'scaleUp: {threshold: 700m, maxStep: "3"}\nscore: {backlog: {upstream: "2k"}}'
        )
    )
    assert policy.demand.max_num_seqs == 1024
    assert policy.demand.prior == StepTime(c0=0.015, cp=60e-6, cb=20e-6, ck=40e-9)
    assert (policy.scale_up.threshold, policy.scale_up.max_step) == (0.7, 3)
    assert policy.score.backlog.upstream == 2000.0


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90.0),
        ("5m", 300.0),
        ("1h30m", 5400.0),
        ("500ms", 0.5),
        ("1.5h", 5400.0),
        ("2d", 172800.0),
        ("1m500ms", 60.5),
        ("0s", 0.0),
        ("0", 0.0),
        ("15", 15.0),
        ("0.25", 0.25),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text",
    [
        "",
        "s",
        "5M",
        "5 m",
        "5min",
        "-5m",
        "-5",
        "1m1h",
        "5m5m",
        "5m30",
        "1e3",
        "010",
        "nan",
        "inf",
        ".5h",
        "367d",
        "٣s",
        "99999999999",
    ],
)
def test_what_is_no_duration_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="must be a duration"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("true", True),
        ("True", True),
        ("YES", True),
        ("on", True),
        ("1", True),
        (" true\n", True),
        ("false", False),
        ("no", False),
        ("0", False),
        ("Off", False),
    ],
)
def test_c130_the_table_of_booleans(text: str, expected: bool) -> None:
    assert parse_bool(text) is expected


@pytest.mark.parametrize("text", ["flase", "", " ", "2", "y", "n", "t", "none", "null", "00", "1.0", "enabled"])
def test_c130_what_is_no_boolean_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="must be one of true, yes, on, 1, false, no, off, 0"):
        parse_bool(text)


# --- cases ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "key", "message"),
    [
        pytest.param("replicas: {max: true}", "spec.replicas.max", "must be a number, but is a boolean", id="max true"),
        pytest.param(
            "scaleUp: {cooldown: false}", "spec.scaleUp.cooldown", "duration, such as 90s, but is a boolean", id="false"
        ),
        pytest.param("interval: yes", "spec.interval", "but is a boolean", id="interval yes"),
        pytest.param("scaleUp: {threshold: on}", "spec.scaleUp.threshold", "but is a boolean", id="threshold on"),
    ],
)
def test_c129_booleans_where_numbers_belong(spec: str, key: str, message: str) -> None:
    text = document(spec)
    if "replicas" in spec:
        text = text.replace("  replicas: {min: 1, max: 8}\n", "")
    problem = only(text)
    assert problem.key == key
    assert message in problem.message
    assert problem.value in ("true", "false")


def test_c129_numeric_text_follows_one_rule_for_all_numbers() -> None:
    policy = one(document('interval: "15"\nscaleUp: {threshold: "0.8", maxStep: "8"}\nscore: {backlog: {wait: "4"}}'))
    assert (policy.interval_s, policy.scale_up.threshold, policy.scale_up.max_step) == (15.0, 0.8, 8)
    assert policy.score.backlog.wait_s == 4.0


@pytest.mark.parametrize("written", ["false", '"false"', '"no"', "no", '"0"', "0", "off", '"FALSE"'])
def test_c130_quoted_false_is_false(written: str) -> None:
    assert one(document(f"dryRun: {written}")).dry_run is False


@pytest.mark.parametrize("written", ["true", '"true"', '"yes"', "yes", '"1"', "1", "on"])
def test_c130_quoted_true_is_true(written: str) -> None:
    assert one(document(f"dryRun: {written}")).dry_run is True


@pytest.mark.parametrize("written", ["flase", '""', "2", "1.0", "null", "[]", "{}", "-1"])
def test_c130_a_malformed_dry_run_is_an_error_never_live(written: str) -> None:
    assert only(document(f"dryRun: {written}")).key == "spec.dryRun"


def test_c130_without_the_key_a_policy_is_live() -> None:
    assert one(document()).dry_run is False


@pytest.mark.parametrize(
    ("replacement", "key", "value", "message"),
    [
        pytest.param("{min: 5, max: 3}", "spec.replicas.min", "5", "must not be above replicas.max (3)", id="5 to 3"),
        pytest.param("{min: -1, max: 3}", "spec.replicas.min", "-1", "must not be negative", id="-1 to 3"),
        pytest.param("{min: 0, max: 0}", "spec.replicas.max", "0", "must be at least 1", id="0 to 0"),
    ],
)
def test_c132_bounds_that_contradict(replacement: str, key: str, value: str, message: str) -> None:
    problem = only(document().replace("{min: 1, max: 8}", replacement))
    assert (problem.key, problem.value) == (key, value)
    assert message in problem.message


def test_c132_equal_bounds_pin_the_size() -> None:
    policy = one(document().replace("{min: 1, max: 8}", "{min: 3, max: 3}"))
    assert (policy.replicas.min, policy.replicas.max) == (3, 3)


def test_c132_thresholds_that_contradict() -> None:
    problem = only(document("scaleDown: {threshold: 0.8}\nscaleUp: {threshold: 0.7}"))
    assert (problem.key, problem.value) == ("spec.scaleDown.threshold", "0.8")
    assert "must be below scaleUp.threshold (0.7)" in problem.message


def test_c132_weights_must_sum_to_1() -> None:
    problem = only(document("score: {weights: {memory: 0.4, backlog: 0.35, latency: 0.35}}"))
    assert problem.key == "spec.score.weights"
    assert problem.message == "must sum to 1, not 0.4 + 0.35 + 0.35 = 1.1"
    assert one(document("score: {weights: {memory: 0.40, backlog: 0.35, latency: 0.25}}"))
    assert one(document("score: {weights: {memory: 0.7, backlog: 0.2, latency: 0.1}}"))


@pytest.mark.parametrize(
    ("spec", "key", "proposal"),
    [
        pytest.param("scaleUp: {threshold: 80}", "spec.scaleUp.threshold", "0.80", id="up 80"),
        pytest.param("score: {memory: {kvFull: 85}}", "spec.score.memory.kvFull", "0.85", id="kv 85"),
        pytest.param('scaleUp: {threshold: "80%"}', "spec.scaleUp.threshold", "0.80", id="up 80%"),
        pytest.param("scaleUp: {threshold: 80 %}", "spec.scaleUp.threshold", "0.80", id="up 80 %"),
        pytest.param("score: {critical: 95}", "spec.score.critical", "0.95", id="critical 95"),
        pytest.param("slo: {ttft: {seconds: 2, quantile: 99.9}}", "spec.slo.ttft.quantile", "0.999", id="p99.9"),
        pytest.param("evidence: {minFreshShare: 70}", "spec.evidence.minFreshShare", "0.70", id="share 70"),
    ],
)
def test_c135_percent_where_a_ratio_belongs(spec: str, key: str, proposal: str) -> None:
    problem = only(document(spec))
    assert problem.key == key
    assert proposal in problem.message


@pytest.mark.parametrize(
    ("spec", "key", "message"),
    [
        pytest.param(
            "signals: {queries: [{signal: upstream_queue, server: 'http://prom', scrapeInterval: 60s,"
            " query: 'sum(rate(gw_total[60s]))'}]}",
            "spec.signals.queries[0].query",
            "[60s] is shorter than two scrapes (60s): it gives empty answers; use [240s]",
            id="query 60s",
        ),
        pytest.param(
            "signals: {queries: [{signal: upstream_queue, server: 'http://prom', scrapeInterval: 60s,"
            " query: 'sum(rate(gw_total[5s]))'}]}",
            "spec.signals.queries[0].query",
            "use [240s]",
            id="query 5s",
        ),
        pytest.param(
            "signals: {vllm: {prometheus: 'http://prom', scrapeInterval: 60s}}",
            "spec.score.window",
            "shorter than two samples (signals.vllm.scrapeInterval 60s): rates will be missing; use 240s",
            id="score window",
        ),
        pytest.param("interval: 40s", "spec.score.window", "(interval 40s)", id="own interval"),
    ],
)
def test_c136_a_window_shorter_than_two_scrapes_is_a_warning(spec: str, key: str, message: str) -> None:
    (warning,) = parse_policies(document(spec), "chat.yaml").warnings
    assert warning.key == key
    assert message in warning.message


@pytest.mark.parametrize(
    "query",
    [
        "sum(rate(gw_total[2m]))",
        "sum(rate(gw_total[1m30s]))",
        'sum(gw_queue{pod=~"chat-[5s]"})',
        "max_over_time(sum(gw_queue)[10s:5s])",
        "sum(gw_queue)",
    ],
)
def test_c136_other_windows_are_none(query: str) -> None:
    spec = (
        "signals: {queries: [{signal: upstream_queue, server: 'http://prom', scrapeInterval: 30s, "
        f"query: '{query}'}}]}}"
    )
    assert parse_policies(document(spec), "chat.yaml").warnings == ()


def test_c139_kinds_other_than_deployment_are_refused() -> None:
    problem = only(document().replace("deployment: chat-a", "kind: LeaderWorkerSet, deployment: deep-a"))
    assert (problem.key, problem.value) == ("spec.target.kind", "LeaderWorkerSet")
    assert problem.message == "only Deployment can be scaled"


def test_c139_a_replica_of_several_pods_can_be_said() -> None:
    text = document().replace("deployment: chat-a", "podsPerReplica: 4, deployment: deep-a")
    assert one(text).target.pods_per_replica == 4


def test_c078_a_down_threshold_that_would_rebound_is_a_warning() -> None:
    (warning,) = parse_policies(document("sizing: score\nscaleDown: {threshold: 0.45}"), "chat.yaml").warnings
    assert warning.key == "spec.scaleDown.threshold"
    assert "from 2 replicas a step down projects to 0.90 >= 0.7" in warning.message


def test_schedules_that_contradict_each_other_are_a_warning() -> None:
    day = "{name: day, cron: 0 8 * * 1-5, duration: 12h, min: 6}"
    night = "{name: night, cron: 0 %d * * *, duration: 12h, max: 4}"
    assert parse_policies(document(f"schedules: [{day}, {night % 20}]"), "chat.yaml").warnings == ()
    (warning,) = parse_policies(document(f"schedules: [{day}, {night % 21}]"), "chat.yaml").warnings
    assert warning.key == "spec.schedules[0].min"
    assert warning.message == "is above the max of night (4), which wins while both are active"


def test_a_fallback_that_never_grows_is_a_warning() -> None:
    assert parse_policies(document("fallback: {replicas: 2}"), "chat.yaml").warnings == ()
    (warning,) = parse_policies(document("fallback: {replicas: 1}"), "chat.yaml").warnings
    assert (warning.key, warning.message) == ("spec.fallback.replicas", "never grows: replicas.min is 1")


# --- bad input ------------------------------------------------------------------------------------------------------

SCHEDULE = "schedules: [{cron: 0 8 * * *, %s}]"
SERVER = "signals: {prometheus: {main: {url: 'http://prom'%s}}}"
BAD = [
    pytest.param("maxReplicas: 3", "spec.maxReplicas", "unknown key; did you mean", id="near key elsewhere"),
    pytest.param("scaleUp: {max_step: 3}", "spec.scaleUp.max_step", "did you mean maxStep?", id="snake case"),
    pytest.param("scaleUp: {maxSteps: 3}", "spec.scaleUp.maxSteps", "did you mean maxStep?", id="misspelt"),
    pytest.param("maxStep: 3", "spec.maxStep", "spec.scaleUp.maxStep or spec.scaleDown.maxStep", id="wrong level"),
    pytest.param("sharding: {mode: auto}", "spec.sharding", "unknown key; known here: target", id="unknown"),
    pytest.param(
        "batching: {mode: on}",
        "spec.batching.mode",
        "must be 'off', 'auto', 'live' or 'rollout'",
        id="a switch that is none",
    ),
    pytest.param("batching: {mode: auto, window: 8s}", "spec.batching.window", "at least two intervals", id="window"),
    pytest.param(
        "batching: {sequences: {min: 9, max: 4}}", "spec.batching.sequences.min", "above its max", id="bounds"
    ),
    pytest.param("batching: {mode: live, rollout: {}}", "spec.batching.rollout", "no use in mode live", id="rollout"),
    pytest.param(
        "batching: {mode: rollout, rollout: {perDay: -1}}",
        "spec.batching.rollout.perDay",
        "must not be negative",
        id="rollouts a day",
    ),
    pytest.param("batching: {ladder: {hard: 0.8}}", "spec.batching.ladder.hard", "must not be below", id="rungs"),
    pytest.param("batching: {tolerance: 5}", "spec.batching.tolerance", "did you mean 0.05", id="percent of goodput"),
    pytest.param(
        "batching: {mode: live}\nsignals: {vllm: null, queries: [{signal: ttft, query: x}]}\nsizing: score",
        "spec.batching.mode",
        "needs signals.vllm",
        id="limits without pages",
    ),
    pytest.param("slo: {ttft: 2}", "spec.slo.ttft", "must be a mapping, but is a number", id="number for mapping"),
    pytest.param("slo: {ttft: {}}", "spec.slo.ttft.seconds", "is required (the objective", id="missing"),
    pytest.param("slo: {ttft: null, itl: null}", "spec.slo", "at least one of", id="no objective"),
    pytest.param("slo: {itl: null}", "spec.slo.itl", "or set sizing: score", id="demand without itl"),
    pytest.param("slo: {ttft: {seconds: 0}}", "spec.slo.ttft.seconds", "must be above 0", id="slo 0"),
    pytest.param("slo: {ttft: {seconds: 2, quantile: 1}}", "spec.slo.ttft.quantile", "in (0, 1)", id="quantile 1"),
    pytest.param("slo: {within: {metric: itl}}", "spec.slo.within.metric", "'ttft' or 'e2e'", id="metric"),
    pytest.param("sizing: both", "spec.sizing", "'demand' or 'score'", id="enum"),
    pytest.param(
        "score: {memory: {source: gpu}}", "spec.score.memory.source", "'kvCache' or 'framebuffer'", id="enum 2"
    ),
    pytest.param("score: []", "spec.score", "must be a mapping, but is a list", id="list for mapping"),
    pytest.param("score:", "spec.score", "must be a mapping, but is empty", id="empty mapping"),
    pytest.param("score: {critical: 0.5}", "spec.score.critical", "above scaleUp.threshold (0.7)", id="critical low"),
    pytest.param("score: {backlog: {weights: [1, 2]}}", "spec.score.backlog.weights", "3 entries, not 2", id="2 of 3"),
    pytest.param(
        "score: {backlog: {combine: weighted, weights: [40, 35, 25]}}",
        "spec.score.backlog.weights",
        "did you mean 0.40 + 0.35 + 0.25?",
        id="weights in percent",
    ),
    pytest.param("score: {latency: {floor: 1}}", "spec.score.latency.floor", "in [0, 1)", id="floor 1"),
    pytest.param("score: {window: 10m}", "spec.score.latency.maxWindow", "below score.window (600s)", id="window"),
    pytest.param("score: {window: 0}", "spec.score.window", "must be above 0", id="window 0"),
    pytest.param("scaleUp: {threshold: .nan}", "spec.scaleUp.threshold", "must be a finite number", id="nan"),
    pytest.param("scaleUp: {threshold: -.inf}", "spec.scaleUp.threshold", "must be a finite number", id="inf"),
    pytest.param("scaleUp: {threshold: '1e400'}", "spec.scaleUp.threshold", "must be a finite number", id="1e400"),
    pytest.param("scaleUp: {maxStep: 2.5}", "spec.scaleUp.maxStep", "must be a whole number", id="2.5 steps"),
    pytest.param("scaleUp: {maxStep: 3G}", "spec.scaleUp.maxStep", "at most 2147483647", id="3G steps"),
    pytest.param("scaleUp: {maxStep: 010}", "spec.scaleUp.maxStep", "leading zero", id="octal"),
    pytest.param("scaleUp: {maxStep: 0}", "spec.scaleUp.maxStep", "must be at least 1", id="no step"),
    pytest.param("scaleUp: {maxStep: two}", "spec.scaleUp.maxStep", "must be a number, such as 8", id="word"),
    pytest.param("scaleUp: {maxStep: 1:30}", "spec.scaleUp.maxStep", "must be a number", id="base 60"),
    pytest.param("scaleUp: {stabilization: 30sec}", "spec.scaleUp.stabilization", "such as 90s", id="30sec"),
    pytest.param("scaleUp: {stabilization: -30s}", "spec.scaleUp.stabilization", "must be a duration", id="-30s"),
    pytest.param("cooldown: -1", "spec.cooldown", "from 0s to 366d", id="negative"),
    pytest.param("cooldown: null", "spec.cooldown", "but is empty", id="null duration"),
    pytest.param("interval: 500ms", "spec.interval", "must be at least 1s", id="fast"),
    pytest.param(
        "scaleUp: {budgets: [{type: pods, value: 2, period: 60s}]}",
        "spec.scaleUp.budgets[0].type",
        "'Pods' or 'Percent'",
        id="budget type",
    ),
    pytest.param(
        "scaleUp: {budgets: [{type: Pods, value: 0, period: 60s}]}",
        "spec.scaleUp.budgets[0].value",
        "must be at least 1",
        id="budget 0",
    ),
    pytest.param("scaleUp: {budgets: {}}", "spec.scaleUp.budgets", "must be a list, but is a mapping", id="no list"),
    pytest.param("scaleDown: {requireDrain: true}", "spec.scaleDown.requireDrain", "needs scaleDown.drain", id="drain"),
    pytest.param("prediction: {bin: 2s}", "spec.prediction.bin", "below interval (5s)", id="bin"),
    pytest.param("prediction: {window: 1h, bin: 10s}", "spec.prediction.window", "3 to 60 times", id="bins"),
    pytest.param("prediction: {zKeep: 1}", "spec.prediction.zKeep", "below prediction.zUp (1.2)", id="no dead band"),
    pytest.param("signals: {vllm: null}", "spec.signals", "nothing to read", id="no signals"),
    pytest.param("signals: {vllm: {port: 0}}", "spec.signals.vllm.port", "1 to 65535", id="port"),
    pytest.param("signals: {vllm: {path: metrics}}", "spec.signals.vllm.path", "must start with /", id="path"),
    pytest.param("signals: {vllm: {modelName: 7}}", "spec.signals.vllm.modelName", "put it in quotes", id="text"),
    pytest.param("signals: {dcgm: {}}", "spec.signals.dcgm", "give urls to scrape", id="dcgm"),
    pytest.param("signals: {dcgm: {prometheus: a}}", "spec.signals.dcgm.prometheus", "no such server", id="server"),
    pytest.param("signals: {dcgm: {urls: [dcgm]}}", "spec.signals.dcgm.urls[0]", "must be a URL", id="dcgm url"),
    pytest.param("signals: {dcgm: {urls: [7]}}", "spec.signals.dcgm.urls[0]", "must be text", id="url number"),
    pytest.param(
        "signals: {queries: [{signal: load, query: up, server: 'http://a'}]}",
        "spec.signals.queries[0].signal",
        "must be one of kv_cache_usage",
        id="signal",
    ),
    pytest.param(SERVER % ", certFile: /a", "spec.signals.prometheus.main.certFile", "go together", id="cert"),
    pytest.param(SERVER % ", username: a", "spec.signals.prometheus.main.username", "go together", id="user"),
    pytest.param(
        "signals: {prometheus: {my.server: {url: 'http://a'}}}",
        "spec.signals.prometheus.my.server",
        "letters",
        id="name",
    ),
    pytest.param("schedules: [{}]", "spec.schedules[0].cron", "is required (minute, hour", id="no cron"),
    pytest.param(SCHEDULE % "min: 2", "spec.schedules[0].duration", "is required (how long", id="no duration"),
    pytest.param(SCHEDULE % "duration: 0s, min: 2", "spec.schedules[0].duration", "above 0s and at most 7d", id="0s"),
    pytest.param(SCHEDULE % "duration: 8d, min: 2", "spec.schedules[0].duration", "above 0s and at most 7d", id="8d"),
    pytest.param(SCHEDULE % "duration: 1h, min: 2, lead: 2d", "spec.schedules[0].lead", "at most 1d", id="lead"),
    pytest.param(
        SCHEDULE % "duration: 1h", "spec.schedules[0]", "moves nothing: give min, max or both", id="no bounds"
    ),
    pytest.param(
        SCHEDULE % "duration: 1h, min: 4, max: 3",
        "spec.schedules[0].min",
        "must not be above its max (3)",
        id="min>max",
    ),
    pytest.param(
        SCHEDULE % "duration: 1h, min: 9",
        "spec.schedules[0].min",
        "must not be above replicas.max (8); give the schedule a max as well",
        id="min above replicas.max",
    ),
    pytest.param(SCHEDULE % "duration: 1h, min: -1", "spec.schedules[0].min", "not be negative", id="min below 0"),
    pytest.param(SCHEDULE % "duration: 1h, max: 0", "spec.schedules[0].max", "must be at least 1", id="max 0"),
    pytest.param(
        SCHEDULE % "duration: 1h, min: 2, timezone: Asia/Shangai",
        "spec.schedules[0].timezone",
        "no time zone of the IANA database; did you mean Asia/Shanghai?",
        id="time zone",
    ),
    pytest.param(
        "schedules: [{cron: 0 8 * * FREITAG, duration: 1h, min: 2}]",
        "spec.schedules[0].cron",
        "is no cron expression (bad day-of-week)",
        id="cron",
    ),
    pytest.param("schedules: [{cron: 8, duration: 1h, min: 2}]", "spec.schedules[0].cron", "must be text", id="cron 8"),
    pytest.param(
        "schedules:\n- {cron: 0 8 * * *, duration: 1h, min: 2}\n- {cron: 0 8 * * *, duration: 2h, min: 3}",
        "spec.schedules[1].name",
        "0 8 * * * UTC is there already: give each its own name",
        id="two without a name",
    ),
    pytest.param("approval: {required: maybe}", "spec.approval.required", "must be one of true, yes", id="maybe"),
    pytest.param("approval: {expiry: 0s}", "spec.approval.expiry", "must be above 0", id="expiry 0"),
    pytest.param(
        "interval: 30s\napproval: {required: true, expiry: 50s}",
        "spec.approval.expiry",
        "must be at least two intervals (30s)",
        id="expiry before anybody can answer",
    ),
    pytest.param("approval: {timeout: 5m}", "spec.approval.timeout", "unknown key", id="approval key"),
    pytest.param("fallback: {}", "spec.fallback.replicas", "is required (grow to so many", id="fallback to what"),
    pytest.param("fallback: {replicas: 0}", "spec.fallback.replicas", "must be at least 1", id="fallback 0"),
    pytest.param("fallback: {replicas: 9}", "spec.fallback.replicas", "above replicas.max (8)", id="fallback 9"),
    pytest.param("fallback: {replicas: 3, after: 0}", "spec.fallback.after", "must be at least 1", id="after 0"),
    pytest.param("fallback: {replicas: 3, after: 30s}", "spec.fallback.after", "must be a number", id="after 30s"),
    pytest.param("dryRun: 1\ndryRun: 0", "spec.dryRun", "is given twice, again in line 8", id="twice"),
    pytest.param("cooldown: !seconds 5", "spec.cooldown", "unknown YAML tag, '!seconds'", id="tag"),
    pytest.param('cooldown: "\\ud800"', "spec.cooldown", "half of an escaped character", id="surrogate"),
    pytest.param("cooldown: !!int five", "spec.cooldown", "its YAML tag int", id="wrong tag"),
]


def test_a_schedules_max_below_replicas_min_is_a_contradiction() -> None:
    text = document(SCHEDULE % "duration: 1h, max: 2")
    assert one(text).schedules[0].max == 2
    problem = only(text.replace("min: 1", "min: 3"))
    assert problem.key == "spec.schedules[0].max"
    assert problem.message == "must not be below replicas.min (3); give the schedule a min as well"


@pytest.mark.parametrize(("spec", "key", "message"), BAD)
def test_a_mistake_is_named_by_key_and_remedy(spec: str, key: str, message: str) -> None:
    found = [problem for problem in problems(document(spec)) if problem.key == key]
    assert len(found) >= 1
    assert any(message in problem.message for problem in found)
    assert all(problem.line >= 6 for problem in found)


ENVELOPE = [
    pytest.param("", "", "is empty", id="empty"),
    pytest.param("# only a comment\n---\n---\n", "", "is empty", id="comments"),
    pytest.param("[1, 2]", "", "must be a mapping with apiVersion, kind, metadata and spec, but is a list", id="list"),
    pytest.param("chat", "", "but is text", id="text"),
    pytest.param(document().replace("v1alpha1", "v2"), "apiVersion", "must be autoscaler/v1alpha1", id="version"),
    pytest.param(document().replace("ScalingPolicy", "ConfigMap"), "kind", "must be ScalingPolicy", id="kind"),
    pytest.param(document().replace("kind: ScalingPolicy\n", ""), "kind", "is required", id="no kind"),
    pytest.param(HEAD, "spec", "is required", id="no spec"),
    pytest.param(HEAD + "spec:\n", "spec", "must be a mapping, but is empty", id="empty spec"),
    pytest.param(document().replace("{name: chat}", "{}"), "metadata.name", "is required", id="no name"),
    pytest.param(document().replace("name: chat", "name: 7"), "metadata.name", "put it in quotes", id="number name"),
    pytest.param(document().replace("name: chat", "name: No"), "metadata.name", "but is a boolean", id="boolean name"),
    pytest.param(document().replace("name: chat", "name: Chat!"), "metadata.name", "Kubernetes name", id="odd name"),
    pytest.param(document().replace("deployment: chat-a", ""), "spec.target.deployment", "is required", id="target"),
    pytest.param(document() + "status: {}\n", "status", "unknown key; known here: apiVersion", id="status"),
    pytest.param("a: [1\nb: 2\n", "", "is not YAML: expected ',' or ']', but got ':', column 2", id="syntax"),
    pytest.param("a:\n\t- b\n", "", "is not YAML: found character '\\t'", id="tab"),
    pytest.param("a: *nothing\n", "", "is not YAML: found undefined alias", id="alias"),
    pytest.param("a: \x00\n", "", "is not YAML: special characters are not allowed, character 3", id="nul"),
    pytest.param('a: "\\UFFFFFFFF"\n', "", "is not YAML: an escape is no character", id="escape"),
    pytest.param("%YAML 1." + "9" * 5000 + "\n---\na: 1\n", "", "is not YAML", id="directive"),
    pytest.param("[" * 3000, "", "is no policy: it is nested deeper than 32", id="deep"),
    pytest.param(HEAD + "spec: " + "{a: " * 40 + "1" + "}" * 40, "", "nested deeper than 32", id="deepish"),
    pytest.param(HEAD + "spec: {? [a, b] : 1}", "spec", "keys must be text", id="list key"),
    pytest.param(HEAD + "spec: {<<: 3}", "spec", "<< must be followed by an alias of a mapping", id="merge"),
    pytest.param("a: &a {b: *a}", "", "nested deeper than 32", id="cycle"),
]


@pytest.mark.parametrize(("text", "key", "message"), ENVELOPE)
def test_a_document_that_is_no_policy(text: str, key: str, message: str) -> None:
    assert any(problem.key == key and message in problem.message for problem in problems(text))


def test_a_syntax_error_has_its_line() -> None:
    problem = only(document() + "a: [1\nb: 2\n")
    assert problem.line == 8
    assert str(problem).startswith("chat.yaml:8: is not YAML")


def test_another_kind_of_document_adds_no_noise() -> None:
    text = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}\ndata: {x: y}\n"
    assert [problem.key for problem in problems(text)] == ["apiVersion", "kind"]


@pytest.mark.parametrize(
    "bomb",
    [
        pytest.param("".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 9)), id="lists"),
        pytest.param("".join(f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}\n" for i in range(1, 9)), id="<<"),
    ],
)
def test_aliases_of_aliases_are_no_policy(bomb: str) -> None:
    assert "more than 20000 values" in only("a0: &a0 {b: 1}\n" + bomb).message


TEN = """\
apiVersion: autoscaler/v1alpha1
kind: ScalingPolicy
metadata: {name: Chat_1}
spec:
  target: {namespace: serving, deployment: chat-a, name: x}
  replicas: {min: 5, max: 3}
  interval: yes
  dryRun: flase
  signals: {vllm: {port: 80000}}
  slo: {ttft: {seconds: 2 seconds}}
  score: {weights: {memory: 0.40, backlog: 0.35, latency: 0.35}}
  scaleUp: {threshold: 80, maxSteps: 3}
  cooldown: -5
"""


def test_all_mistakes_are_said_at_once_in_the_order_of_the_file() -> None:
    assert [(problem.line, problem.key) for problem in problems(TEN)] == [
        (3, "metadata.name"),
        (5, "spec.target.name"),
        (6, "spec.replicas.min"),
        (7, "spec.interval"),
        (8, "spec.dryRun"),
        (9, "spec.signals.vllm.port"),
        (10, "spec.slo.ttft.seconds"),
        (11, "spec.score.weights"),
        (12, "spec.scaleUp.maxSteps"),
        (12, "spec.scaleUp.threshold"),
        (13, "spec.cooldown"),
    ]


@pytest.mark.parametrize(
    ("spec", "key"),
    [
        pytest.param("scaleUp: {threshold: O.9}\nscaleDown: {threshold: 0.8}", "spec.scaleUp.threshold", id="other"),
        pytest.param(
            "score: {weights: {memory: x, backlog: 0, latency: 0.5}}", "spec.score.weights.memory", id="inside"
        ),
        pytest.param("score: {weights: {memroy: 0.5, backlog: 0.5}}", "spec.score.weights.memroy", id="misspelt"),
        pytest.param("interval: 5 s\nprediction: {bin: 3s, window: 30s}", "spec.interval", id="interval"),
    ],
)
def test_nothing_is_concluded_from_a_broken_key(spec: str, key: str) -> None:
    assert only(document(spec)).key == key


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param("signals: {prometheus: {a: {url: 'http://b', bearerToken: hunter2}}}", id="unknown key"),
        pytest.param("signals: {prometheus: {a: {url: 'http://me:hunter2@b'}}}", id="url"),
        pytest.param("signals: {prometheus: {a: {url: 'ftp://me:hunter2@b'}}}", id="other url"),
        pytest.param("signals: {vllm: {prometheus: 'http://me:hunter2@b'}}", id="server"),
        pytest.param("signals: {prometheus: {a: {url: 'http://b', headers: {k: [hunter2]}}}}", id="header list"),
        pytest.param("signals: {prometheus: {a: {url: 'http://b', headers: {k: !x hunter2}}}}", id="header tag"),
    ],
)
def test_messages_hold_no_secrets(spec: str) -> None:
    found = problems(document(spec))
    assert found
    assert "hunter2" not in "".join(str(problem) for problem in found)


def test_odd_text_is_shown_safely() -> None:
    shown = str(PolicyError(problems(document('"a\\u0007\\ud800": 1\nsizing: "\\u001b[31m\\ud83d\\ude00"'))))
    assert shown.replace("\n", "").isprintable()
    assert r"\u001b[31m\ud83d\ude00" in shown
    servers = 'signals: {dcgm: {prometheus: a}, prometheus: {"\\ufdc8": {url: "http://b"}, b: {url: "http://b"}}}'
    assert "\n".join(str(problem) for problem in problems(document(servers))).replace("\n", "").isprintable()


# --- good input -----------------------------------------------------------------------------------------------------


def test_the_smallest_policy() -> None:
    text = HEAD + "spec: {target: {deployment: chat-a}, replicas: {max: 4}}"
    policy = one(text)
    assert (policy.name, policy.target.namespace, policy.replicas.min, policy.interval_s) == ("chat", "default", 1, 5.0)


def test_durations_nulls_and_aliases() -> None:
    policy = one(
        document(
            "score: {backlog: {waitingPerReplica: null, wait: 500ms}}\n"
            "slo: {ttft: &slo {seconds: 1500ms, quantile: 0.95}, itl: {<<: *slo, seconds: 0.1}}\n"
            "scaleUp: {maxStep: null, cooldown: 1m30s, budgets: [{type: Percent, value: 100, period: 1m}]}"
        )
    )
    assert policy.score.backlog.waiting_per_replica is None
    assert policy.score.backlog.wait_s == 0.5
    assert policy.slo.ttft is not None
    assert policy.slo.itl is not None
    assert (policy.slo.ttft.seconds, policy.slo.itl.seconds, policy.slo.itl.quantile) == (1.5, 0.1, 0.95)
    assert (policy.scale_up.max_step, policy.up_cooldown_s) == (None, 90.0)
    assert policy.scale_up.budgets[0].period_s == 60.0


def test_several_documents_and_labels() -> None:
    text = (
        document() + "---\n" + document().replace("chat", "code").replace("{name:", "{labels: {a: b}, name:") + "---\n"
    )
    assert list(parse_policies(text, "all.yaml").policies) == ["chat", "code"]


def test_two_policies_of_one_name_or_one_deployment() -> None:
    text = document() + "---\n" + document()
    first, second = problems(text)
    assert (first.key, first.value, first.line) == ("metadata.name", "chat", 10)
    assert (second.key, second.value, second.line) == ("spec.target", "serving/chat-a", 12)
    assert "is taken by chat.yaml:3" in first.message


def test_documents_are_compared_even_when_one_has_mistakes() -> None:
    text = document() + "---\n" + document("interval: yes")
    assert [problem.key for problem in problems(text)] == ["spec.interval", "metadata.name", "spec.target"]


# --- files ----------------------------------------------------------------------------------------------------------


def failing(*paths: Path) -> tuple[Problem, ...]:
    with pytest.raises(PolicyError) as caught:
        load_policies(paths)
    return caught.value.problems


def test_a_mounted_config_map_is_read_once(tmp_path: Path) -> None:
    version = tmp_path / "..2026_01_01"
    version.mkdir()
    (version / "chat.yaml").write_text(document())
    (tmp_path / "..data").symlink_to(version.name)
    (tmp_path / "chat.yaml").symlink_to(Path("..data") / "chat.yaml")
    (tmp_path / ".hidden.yaml").write_text("[")
    (tmp_path / "notes.txt").write_text("[")
    (tmp_path / "code.yml").write_text(document().replace("chat", "code"))
    assert list(load_policies([tmp_path]).policies) == ["chat", "code"]


def test_a_file_named_twice_is_read_once(tmp_path: Path) -> None:
    (tmp_path / "chat.yaml").write_text(document())
    assert list(load_policies([tmp_path, tmp_path / "chat.yaml"]).policies) == ["chat"]


def test_every_file_is_judged(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(document("interval: yes"))
    (tmp_path / "b.yaml").write_text(document("cooldown: x").replace("chat", "code"))
    (tmp_path / "c.yaml").write_text(": : :")
    found = failing(tmp_path, tmp_path / "missing.yaml")
    assert [(Path(problem.file).name, problem.key) for problem in found] == [
        ("missing.yaml", ""),
        ("a.yaml", "spec.interval"),
        ("b.yaml", "spec.cooldown"),
        ("c.yaml", ""),
    ]


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"name: caf\xe9")
    (tmp_path / "huge.yaml").write_text("#" * 300_000)
    (tmp_path / "dangling.yaml").symlink_to("nowhere")
    (tmp_path / "folder.yaml").mkdir()
    messages = {Path(problem.file).name: problem.message for problem in failing(tmp_path)}
    assert messages == {
        "latin.yaml": "is not UTF-8 text (byte 9)",
        "huge.yaml": "is larger than 256 KiB: not a policy file",
        "dangling.yaml": f"cannot be read: {os.strerror(2)}",
        "folder.yaml": f"cannot be read: {os.strerror(21)}",
    }


def test_no_files(tmp_path: Path) -> None:
    assert failing()[0].message == "no policy file was given"
    assert failing(tmp_path)[0].message == "holds no policy file (.yaml, .yml)"


def test_a_byte_order_mark_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "chat.yaml").write_bytes(b"\xef\xbb\xbf" + document().encode())
    assert list(load_policies([tmp_path]).policies) == ["chat"]


# --- plain form -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "key"),
    [
        pytest.param({"interval_s": "5"}, "interval_s", id="text for number"),
        pytest.param({"dry_run": 0}, "dry_run", id="number for boolean"),
        pytest.param({"cooldown_s": float("nan")}, "cooldown_s", id="nan"),
        pytest.param({"maxStep": 3}, "maxStep", id="unknown"),
        pytest.param({"replicas": {"max": True}}, "replicas.max", id="boolean for number"),
        pytest.param({"target": {}}, "target.deployment", id="missing"),
        pytest.param({"interval_s": {1, 2}}, "", id="not JSON"),
    ],
)
def test_a_plain_form_is_taken_as_it_is_or_not_at_all(change: Mapping[str, Any], key: str) -> None:
    plain = policy_to_plain(one(document())) | dict(change)
    with pytest.raises(PolicyError) as caught:
        policy_from_plain(plain)
    assert [problem.key for problem in caught.value.problems] == [key]


# --- properties -----------------------------------------------------------------------------------------------------

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(
        ["90s", "5m", "80%", "500m", "1Gi", "yes", "0", "false", "max", "weighted", "http://a", "Pods", "e2e"]
    ),
)
KEYS = st.one_of(
    st.text(max_size=6),
    st.sampled_from(
        ["spec", "metadata", "name", "target", "replicas", "max", "min", "score", "signals", "vllm", "slo"]
    ),
)
TREES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=12
)
SCHEMA = jsonschema.Draft202012Validator(json_schema())
FULL: dict[str, Any] = copy.deepcopy(BASE)
FULL["spec"] |= {
    "interval": "15s",
    "dryRun": True,
    "sizing": "score",
    "cooldown": 90,
    "signals": {
        "vllm": {"port": 8000, "prometheus": "main"},
        "dcgm": {"urls": ["http://a/metrics"]},
        "nvml": {"timeout": "1s"},
        "prometheus": {"main": {"url": "http://a", "headers": {"X-Scope-OrgID": "a"}}},
        "queries": [{"signal": "ttft", "query": "up", "server": "main", "staleAfter": "30s"}],
    },
    "slo": {"ttft": {"seconds": 2, "quantile": 0.9}, "within": {"seconds": "2s", "share": 0.95, "metric": "e2e"}},
    "score": {"weights": {"memory": 0.5, "backlog": 0.25, "latency": 0.25}, "backlog": {"weights": [0.4, 0.35, 0.25]}},
    "scaleUp": {"maxStep": 4, "budgets": [{"type": "Pods", "value": 2, "period": "1m"}], "select": "Min"},
    "prediction": {"window": "5m", "bin": "30s", "horizon": None},
    "demand": {"prior": {"c0": 0.01}, "learn": False},
}


def outcome(text: str) -> Loaded | None:
    """Return what a text holds, None when it is refused in words that can be printed."""
    try:
        return parse_policies(text, "any.yaml")
    except PolicyError as error:
        refused = error
    assert refused.problems
    assert str(refused).replace("\n", "").isprintable()
    return None


@given(st.text(max_size=60))
def test_any_text_is_a_policy_or_a_policy_error(text: str) -> None:
    assert outcome(text) is None


@given(TREES)
def test_any_tree_is_a_policy_or_a_policy_error(tree: Any) -> None:
    outcome(json.dumps(tree))
    outcome(json.dumps({**BASE, "spec": tree}))
    assert outcome(json.dumps({**BASE, "metadata": tree, "kind": "Other"})) is None


def places(tree: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [path, *(place for key, value in items for place in places(value, (*path, key)))]


@given(st.data())
def test_a_changed_policy_is_refused_or_agrees_with_the_schema_and_its_plain_form(data: st.DataObject) -> None:
    tree = copy.deepcopy(FULL)
    for _ in range(data.draw(st.integers(1, 2))):
        *above, last = data.draw(st.sampled_from(places(tree)[1:]))
        parent: Any = tree
        for key in above:
            parent = parent[key]
        if isinstance(parent, dict) and data.draw(st.booleans()):
            del parent[last]
            parent[data.draw(KEYS)] = data.draw(SCALARS)
        else:
            parent[last] = data.draw(TREES)
    found = outcome(json.dumps(tree))
    if found is not None:
        SCHEMA.validate(tree)
        (policy,) = found.policies.values()
        assert policy_from_plain(json.loads(json.dumps(policy_to_plain(policy)))) == policy


def test_the_policy_that_is_changed_is_a_good_one() -> None:
    assert outcome(json.dumps(FULL)) is not None
    SCHEMA.validate(FULL)


@pytest.mark.parametrize(
    ("written", "mode"),
    [
        pytest.param("off", BatchingMode.OFF, id="yaml makes a boolean of it"),
        pytest.param("'off'", BatchingMode.OFF, id="quoted"),
        pytest.param("auto", BatchingMode.AUTO, id="auto"),
        pytest.param("live", BatchingMode.LIVE, id="live"),
        pytest.param("rollout", BatchingMode.ROLLOUT, id="rollout"),
    ],
)
def test_what_moves_the_batching_limits(written: str, mode: BatchingMode) -> None:
    assert one(document(f"batching: {{mode: {written}}}")).batching.mode is mode
    assert one(document()).batching.mode is BatchingMode.OFF
