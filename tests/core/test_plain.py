"""Values as plain data."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscaler.core.plain import to_number, to_plain
from autoscaler.core.policy import Policy, PrometheusServer, ReplicaBounds, Signals, TargetRef
from autoscaler.core.types import (
    Decision,
    DeletionCost,
    Demand,
    EngineKey,
    Forecast,
    Gap,
    GapReason,
    Hold,
    Mode,
    Proposal,
    Reason,
    ScaleReplicas,
    Step,
)


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        pytest.param(None, None, id="none"),
        pytest.param(True, True, id="bool"),
        pytest.param(3, 3, id="int"),
        pytest.param("text", "text", id="str"),
        pytest.param(0.1, 0.1, id="float"),
        pytest.param(math.nan, "nan", id="nan"),
        pytest.param(math.inf, "inf", id="infinity"),
        pytest.param(-math.inf, "-inf", id="negative infinity"),
        pytest.param(np.float64(0.5), 0.5, id="numpy float"),
        pytest.param(np.float64("nan"), "nan", id="numpy nan"),
        pytest.param(np.bool_(True), True, id="numpy bool"),
        pytest.param(np.array([[1.0, np.inf]]), [[1.0, "inf"]], id="array"),
        pytest.param((1, (2.0, "a")), [1, [2.0, "a"]], id="tuples"),
        pytest.param([1, [2]], [1, [2]], id="lists"),
        pytest.param({"a": (1,), 2: None}, {"a": [1], "2": None}, id="mapping"),
        pytest.param(EngineKey("uid", "1"), ["uid", "1"], id="named tuple"),
        pytest.param(GapReason.STALE, "stale", id="enum"),
        pytest.param(Hold(), {"kind": "hold"}, id="hold"),
        pytest.param(
            ScaleReplicas(seen=2, to=4, uid="u"),
            {"kind": "scale_replicas", "seen": 2, "to": 4, "uid": "u", "costs": []},
            id="scale",
        ),
        pytest.param(
            ScaleReplicas(seen=2, to=1, costs=(DeletionCost(pod="a", uid="u", cost=-1),)),
            {
                "kind": "scale_replicas",
                "seen": 2,
                "to": 1,
                "uid": "",
                "costs": [{"pod": "a", "uid": "u", "cost": -1, "requests": None}],
            },
            id="costs",
        ),
        pytest.param(
            Gap(signal="ttft", reason=GapReason.TIMEOUT, pod="chat-1"),
            {"signal": "ttft", "reason": "timeout", "source": "", "pod": "chat-1", "detail": ""},
            id="dataclass",
        ),
    ],
)
def test_plain_forms(value: object, plain: object) -> None:
    assert to_plain(value) == plain
    assert type(to_plain(value)) is type(plain)


def test_a_decision_survives_json() -> None:
    step = Step(rule=Reason.LIMITED_STEP, before=9, after=4)
    decision = Decision(
        at=1764500000.002,
        score=None,
        demand=Demand(itl=1.0 / 3.0, kv=math.nan, sequences=2.0),
        forecast=Forecast(horizon_s=185.0),
        proposal=Proposal(current=2, replicas=4, reason=Reason.UP_DEMAND, steps=(step,), wished=9),
        reason=Reason.UP_DEMAND,
        mode=Mode.QPS_SPIKE,
        action=ScaleReplicas(seen=2, to=4),
        unblocks=("demand below 2.0",),
    )
    plain = to_plain(decision)
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert isinstance(plain, dict)
    assert plain["demand"] == {"itl": 1.0 / 3.0, "kv": "nan", "sequences": 2.0, "gap": None}
    assert plain["action"] == {"kind": "scale_replicas", "seen": 2, "to": 4, "uid": "", "costs": []}
    proposal = plain["proposal"]
    assert isinstance(proposal, dict)
    assert (proposal["reason"], proposal["urgent"], proposal["wished"]) == ("up_demand", False, 9)
    assert proposal["steps"] == [{"rule": "limited_step", "before": 9, "after": 4, "detail": ""}]


def test_a_policy_is_plain_all_the_way_down() -> None:
    servers = {"default": PrometheusServer(url="http://prometheus:9090", headers={"X-Scope-OrgID": "a"})}
    policy = Policy(
        name="chat",
        target=TargetRef(deployment="chat"),
        replicas=ReplicaBounds(max=4),
        signals=Signals(prometheus=servers),
    )
    plain = to_plain(policy)
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert isinstance(plain, dict)
    assert plain["replicas"] == {"max": 4, "min": 1}


@given(st.floats())
def test_every_float_is_read_back_bit_for_bit(value: float) -> None:
    plain = json.loads(json.dumps(to_plain(value), allow_nan=False))
    back = to_number(plain)
    assert isinstance(back, float)
    assert math.isnan(back) if math.isnan(value) else np.float64(back).tobytes() == np.float64(value).tobytes()


@pytest.mark.parametrize("value", [pytest.param(object(), id="object"), pytest.param({1, 2}, id="set")])
def test_a_foreign_type_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match="has no plain form"):
        to_plain(value)


def test_unknown_and_numbers_are_read_back_as_they_are() -> None:
    assert [to_number(plain) for plain in (None, 3, 0.5)] == [None, 3, 0.5]
