"""What a pod template says of its pods: how they end."""

from typing import Any

import pytest

from autoscaler.core.types import Drain
from autoscaler.sources.pod_template import drain_of


def a_template(*args: str, grace: int | None = None, pre_stop: Any = None) -> Any:
    container: dict[str, Any] = {"name": "vllm", "args": list(args)}
    container |= {"lifecycle": {"preStop": pre_stop}} if pre_stop else {}
    sidecar = {"name": "sidecar", "image": "proxy"}
    return {
        "spec": {"containers": [sidecar, container]}
        | ({} if grace is None else {"terminationGracePeriodSeconds": grace})
    }


def shell(command: str) -> dict[str, Any]:
    return {"exec": {"command": ["/bin/sh", "-c", command]}}


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        pytest.param({}, Drain(), id="empty"),
        pytest.param(a_template(), Drain(grace_s=30.0, pre_stop_s=0.0, drain_s=0.0), id="defaults"),
        pytest.param(a_template(grace=0), Drain(grace_s=0.0), id="no grace"),
        pytest.param(a_template("--shutdown-timeout", "300"), Drain(drain_s=300.0), id="two words"),
        pytest.param(a_template("--shutdown-timeout=2.5"), Drain(drain_s=2.5), id="one word"),
        pytest.param(a_template("vllm serve x --shutdown_timeout '60' -q"), Drain(drain_s=60.0), id="in a shell"),
        pytest.param(a_template("--shutdown-timeout=9", "--shutdown-timeout=8"), Drain(drain_s=8.0), id="last counts"),
        pytest.param(a_template("--shutdown-timeout=60s"), Drain(), id="not a number"),
        pytest.param(a_template(pre_stop={"sleep": {"seconds": 15}}), Drain(pre_stop_s=15.0), id="sleep"),
        pytest.param(a_template(pre_stop=shell("sleep 5 && sleep 10s")), Drain(pre_stop_s=15.0), id="commands"),
        pytest.param(a_template(pre_stop=shell("drain.sh")), Drain(pre_stop_s=None), id="unknown length"),
        pytest.param(a_template(pre_stop={"httpGet": {"path": "/"}}), Drain(pre_stop_s=None), id="request"),
    ],
)
def test_how_a_pod_ends(template: Any, expected: Drain) -> None:
    assert drain_of(template) == expected
