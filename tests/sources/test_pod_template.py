"""What a pod template says of its pods: how they end, and whether their batching limits can be changed there."""

from typing import Any

import pytest

from autoscaler.core.note import NOTE
from autoscaler.core.types import Drain, Limits, Template
from autoscaler.sources.cluster import PRUNE
from autoscaler.sources.pod_template import drain_of, template_of
from tests.fake_api import deployment


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


# --- the batching limits --------------------------------------------------------------------------------------------

SAID = ("--max-num-seqs", "64", "--max-num-batched-tokens=2048")


def a_deployment(*args: str, replicas: int = 4, strategy: Any = None, **metadata: Any) -> Any:
    """Return a Deployment as the cache keeps it."""
    found = deployment(replicas=replicas)
    found["spec"]["template"] = a_template(*args)
    if strategy is not None:
        found["spec"]["strategy"] = strategy
    for key, value in metadata.items():
        found["metadata"][key] = value
    return PRUNE["deployments"](found)


def rolling(surge: object, unavailable: object) -> Any:
    return {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": surge, "maxUnavailable": unavailable}}


def wrote(manager: str, field: str = "f:args", operation: str = "Update") -> Any:
    """Return an entry of `managedFields` of who wrote a field of the engine's container."""
    pods: Any = {"f:spec": {"f:containers": {'k:{"name":"vllm"}': {".": {}, "f:image": {}, field: {}}}}}
    return {"manager": manager, "operation": operation, "fieldsV1": {"f:spec": {"f:template": pods}}}


def test_a_template_is_read_in_full() -> None:
    note = {NOTE: "a note"}
    found = template_of(a_deployment(*SAID, "--max-model-len=8k", strategy=rolling(1, 0), annotations=note), "hash")
    assert found == Template(
        revision="hash",
        container="vllm",
        limits=Limits(max_num_seqs=64, max_num_batched_tokens=2048),
        chunked_prefill=True,
        max_model_len=8000,
        max_surge=1,
        max_unavailable=0,
        print=found.print,
        note="a note",
    )
    assert len(found.print) == 16


@pytest.mark.parametrize(
    ("strategy", "replicas", "surge", "unavailable"),
    [
        pytest.param(None, 4, 1, 1, id="the defaults"),
        pytest.param(None, 3, 1, 0, id="the defaults, of three"),
        pytest.param(rolling("10%", "10%"), 15, 2, 1, id="surge rounds up, the other down"),
        pytest.param(rolling(3, 0), 1, 3, 0, id="numbers"),
        pytest.param(rolling("many", None), 4, 0, 0, id="neither"),
    ],
)
def test_how_many_pods_more_and_fewer(strategy: Any, replicas: int, surge: int, unavailable: int) -> None:
    found = template_of(a_deployment(*SAID, replicas=replicas, strategy=strategy), "")
    assert (found.max_surge, found.max_unavailable, found.recreate) == (surge, unavailable, False)


def test_recreate_ends_all_pods_first() -> None:
    assert template_of(a_deployment(*SAID, strategy={"type": "Recreate"}), "").recreate


@pytest.mark.parametrize(
    ("metadata", "owner"),
    [
        pytest.param({}, "", id="nobody"),
        pytest.param({"managedFields": [wrote("kubectl-client-side-apply"), wrote("helm")]}, "", id="by hand"),
        pytest.param({"managedFields": [wrote("autoscaler", operation="Apply")]}, "", id="ourselves"),
        pytest.param(
            {"managedFields": [wrote("argocd-controller")]},
            "argocd-controller (field manager of the arguments)",
            id="a controller",
        ),
        pytest.param({"managedFields": [wrote("argocd-controller", "f:image")]}, "", id="of another field"),
        pytest.param(
            {"managedFields": [wrote("kubectl", "f:command", "Apply")]},
            "kubectl (field manager of the arguments)",
            id="a claim by server-side apply",
        ),
        pytest.param(
            {"annotations": {"argocd.argoproj.io/tracking-id": "x"}},
            "Argo CD (argocd.argoproj.io/tracking-id)",
            id="argo cd's mark",
        ),
        pytest.param(
            {"labels": {"kustomize.toolkit.fluxcd.io/name": "apps"}},
            "Flux (kustomize.toolkit.fluxcd.io/name)",
            id="flux's mark",
        ),
    ],
)
def test_who_would_undo_a_change(metadata: Any, owner: str) -> None:
    assert template_of(a_deployment(*SAID, **metadata), "").owner == owner


def test_the_print_is_of_everything_but_the_limits() -> None:
    def print_of(*args: str, image: str = "vllm") -> str:
        found = a_deployment(*args)
        found["spec"]["template"]["spec"]["containers"][1]["image"] = image
        found["spec"]["template"]["metadata"] = {"annotations": {"kubectl.kubernetes.io/restartedAt": image}}
        return template_of(found, "").print

    same = print_of("--max-num-seqs", "65", "--max-num-batched-tokens=1")
    assert print_of(*SAID) == same
    assert print_of(*SAID, "--seed=1") != same
    assert print_of(*SAID, image="vllm:2") != same
    restarted = a_deployment(*SAID)
    restarted["spec"]["template"]["metadata"] = {"annotations": {"kubectl.kubernetes.io/restartedAt": "now"}}
    assert template_of(restarted, "").print == template_of(a_deployment(*SAID), "").print


def test_several_engines_are_none_of_ours() -> None:
    found = a_deployment(*SAID)
    containers = found["spec"]["template"]["spec"]["containers"]
    containers[0]["args"] = ["--max-num-seqs=1"]
    assert template_of(found, "").fixed == "several containers say limits: sidecar, vllm"
    containers.clear()
    assert template_of(found, "").fixed == "the pod template has no containers"


def test_nothing_is_said() -> None:
    assert template_of({}, "") == Template(fixed="the pod template has no containers", print=template_of({}, "").print)
    found = template_of(a_deployment("--model=m"), "")
    assert (found.container, found.limits) == ("sidecar", Limits())
    assert found.fixed.startswith("the arguments say neither")
