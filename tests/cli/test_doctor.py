"""`autoscaler doctor` against a fake cluster: what it says, its exit codes, and that it only asks."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autoscaler.actuators.deletion_cost import RIGHTS as MARKS
from autoscaler.actuators.deployment import RIGHTS as WRITES
from autoscaler.actuators.events import RIGHTS as TELLS
from autoscaler.actuators.rollout import RIGHTS as ROLLS
from autoscaler.cli.doctor import needed_rights
from autoscaler.cli.main import run
from autoscaler.lease import RIGHTS as ELECTS
from autoscaler.sources.deployment import RIGHTS as READS
from autoscaler.sources.kubernetes_api import KubernetesApi
from tests.cli.cluster import PODS, Cluster, cluster
from tests.fake_api import Fault, hpa

REVIEW = "create selfsubjectaccessreviews"
NODES = ("", "nodes", "list")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Return a cluster for all tests of this file, which leave it as they found it."""
    with cluster(tmp_path_factory.mktemp("cluster")) as one:
        yield one


@pytest.fixture
def world(shared: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Return the cluster with a folder of its own for policies, and with no request seen yet."""
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    shared.folder = tmp_path
    shared.api.requests.clear()
    assert shared.api.deployment is not None
    shared.api.deployment["spec"]["template"] = template()
    shared.api.nodes = [node("8")]
    yield shared
    shared.api.rights = None
    shared.api.hpas.clear()
    shared.api.faults.clear()


def template() -> dict[str, Any]:
    """Return a pod template that can drain."""
    container = {
        "name": "vllm",
        "args": ["--max-num-seqs", "64", "--shutdown-timeout", "300"],
        "lifecycle": {"preStop": {"sleep": {"seconds": 15}}},
        "resources": {"limits": {"nvidia.com/gpu": "1"}},
    }
    return {"spec": {"terminationGracePeriodSeconds": 330, "containers": [container]}}


def node(gpus: str) -> dict[str, Any]:
    ready = [{"type": "Ready", "status": "True"}]
    return {"metadata": {"name": "n"}, "status": {"allocatable": {"nvidia.com/gpu": gpus}, "conditions": ready}}


def examine(world: Cluster, *arguments: str) -> int:
    return run(["doctor", *arguments, "--kubeconfig", world.kubeconfig])


def findings(
    world: Cluster, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, dict[str, list[dict[str, Any]]]]:
    """Return the exit code, and the findings of the only policy by check."""
    code = examine(world, *arguments, "--json")
    (policy,) = json.loads(capsys.readouterr().out)["policies"]
    found: dict[str, list[dict[str, Any]]] = {}
    for finding in policy["findings"]:
        found.setdefault(finding["check"], []).append(finding)
    return code, found


def levels(found: dict[str, list[dict[str, Any]]]) -> dict[str, str]:
    """Return the levels of each check."""
    return {check: " ".join(finding["level"] for finding in each) for check, each in found.items()}


def test_a_good_policy_has_no_problem_and_nothing_is_written(
    world: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    before = json.dumps(world.api.deployment)
    code, found = findings(world, capsys, str(world.policy(replicas="{min: 4, max: 8}")))
    assert code == 0
    assert levels(found) == {
        "rights": "ok",
        "drain": "ok",
        "room": "ok",
        "target": "warning",
        "owners": "ok",
        "batching": "warning",
        "engines": "ok",
        "signals": "ok",
        "model": "ok",
        "decision": "ok",
    }
    assert found["engines"][0]["text"] == f"{PODS} of {PODS} pods give engine metrics"
    assert "kv_cache_usage (vllm:kv_cache_usage_perc)" in found["signals"][0]["text"]
    assert "Llama-3.1-8B x2" in found["model"][0]["text"]
    assert found["decision"][0]["text"].startswith("scale 2 to 4: up_bounds; ")
    asked = {request.verb for request in world.api.requests if request.resource != "selfsubjectaccessreviews"}
    assert asked <= {"get", "list", "watch"}
    assert json.dumps(world.api.deployment) == before
    assert world.api.events == {}


def test_it_asks_for_every_right_of_every_table(world: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert needed_rights(acting=True) >= READS | WRITES | TELLS
    assert needed_rights(acting=False) == needed_rights(acting=False, marking=True, rolling=True) == READS
    assert needed_rights(acting=True, rolling=True) - needed_rights(acting=True) == ROLLS
    assert needed_rights(acting=True, marking=True) == needed_rights(acting=True) | MARKS
    assert not needed_rights(acting=True) & MARKS
    findings(world, capsys, str(world.policy()))
    reviews = [request.body["spec"] for request in world.api.requests if request.resource.endswith("reviews")]
    asked = set()
    for review in (one["resourceAttributes"] for one in reviews):
        assert review["namespace"] == "serving"
        sub = f"/{review['subresource']}" if review["subresource"] else ""
        asked.add((review["group"], review["resource"] + sub, review["verb"]))
    assert asked == needed_rights(acting=True)


@pytest.mark.parametrize("right", sorted(needed_rights(acting=True) | {NODES}), ids=lambda right: "-".join(right[1:]))
def test_without_a_right_it_is_a_finding_and_no_crash(
    right: tuple[str, str, str], world: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    world.api.rights = (needed_rights(acting=True) | {NODES}) - {right}
    code, found = findings(world, capsys, str(world.policy()))
    if right == NODES:
        assert (code, levels(found)["rights"], levels(found)["room"]) == (0, "ok", "unknown")
        assert "cannot be told: forbidden" in found["room"][0]["text"]
        return
    dispensable = right[1] in ("horizontalpodautoscalers", "events")
    assert (code, levels(found)["rights"]) == ((0, "warning") if dispensable else (1, "problem"))
    assert f"{right[2]} {right[1]}" in found["rights"][0]["text"]
    assert right[2] in found["rights"][0]["remedy"]


@pytest.mark.parametrize(("failure", "level"), [("proceed", "warning"), ("hold", "problem")])
def test_a_policy_that_has_pods_marked_needs_the_right_to_it(
    failure: str, level: str, world: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(world.policy(more=f"  scaleDown: {{victims: {{order: emptiest, onFailure: {failure}}}}}\n"))
    world.api.rights = needed_rights(acting=True, marking=True)
    assert levels(findings(world, capsys, path)[1])["rights"] == "ok"
    world.api.rights = needed_rights(acting=True)
    code, found = findings(world, capsys, path)
    assert (code, levels(found)["rights"]) == (int(level == "problem"), level)
    assert "patch pods" in found["rights"][0]["text"]
    code, found = findings(world, capsys, path, "--dry-run")
    assert levels(found)["rights"] == "ok"


def test_a_lease_needs_rights_of_its_own(world: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(world.policy())
    world.api.rights = needed_rights(acting=True) | ELECTS
    code, found = findings(world, capsys, path, "--lease", "ops/autoscaler")
    assert (code, levels(found)["lease"], levels(found)["rights"]) == (0, "ok", "ok")
    reviews = [request.body["spec"] for request in world.api.requests if request.resource.endswith("reviews")]
    asked = [one["resourceAttributes"] for one in reviews if one["resourceAttributes"]["resource"] == "leases"]
    assert {one["verb"] for one in asked} == {"get", "create", "patch"}
    assert {one["namespace"] for one in asked} == {"ops"}
    assert "lease" not in findings(world, capsys, path)[1]
    assert "lease" not in findings(world, capsys, path, "--lease", "ops/autoscaler", "--dry-run")[1]


@pytest.mark.parametrize("right", sorted(ELECTS), ids=lambda right: right[2])
def test_without_a_right_to_the_lease_nobody_would_write(
    right: tuple[str, str, str], world: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    world.api.rights = (needed_rights(acting=True) | ELECTS) - {right}
    code, found = findings(world, capsys, str(world.policy()), "--lease", "ops/autoscaler")
    assert (code, levels(found)["lease"], levels(found)["rights"]) == (1, "problem", "ok")
    (finding,) = found["lease"]
    assert finding["text"] == f"not granted in ops: {right[2]} leases; no daemon comes to lead, and none writes"
    assert f'apiGroups: ["coordination.k8s.io"], resources: [leases], verbs: [{right[2]}]' in finding["remedy"]


def test_a_lease_without_a_namespace_is_refused(world: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert examine(world, str(world.policy()), "--lease", "autoscaler") == 2
    assert "must be NAMESPACE/NAME" in capsys.readouterr().err


def test_with_no_right_at_all_it_says_so(world: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    world.api.rights = frozenset()
    code, found = findings(world, capsys, str(world.policy()))
    assert (code, levels(found)["target"]) == (1, "problem")
    assert "forbidden" in found["target"][0]["text"]
    assert set(found) == {"rights", "target"}


@pytest.mark.parametrize("by", ["flag", "policy"])
def test_in_dry_run_no_right_to_write_is_needed(by: str, world: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    world.api.rights = READS
    path = str(world.policy(more="  dryRun: true\n" if by == "policy" else ""))
    code, found = findings(world, capsys, path, *(["--dry-run"] if by == "flag" else []))
    assert (code, levels(found)["rights"]) == (0, "ok")


def test_another_owner_is_a_problem(world: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    world.api.hpas.append(hpa("rival"))
    code, found = findings(world, capsys, str(world.policy()))
    assert (code, levels(found)["owners"], levels(found)["decision"]) == (1, "problem", "warning")
    assert "HorizontalPodAutoscaler/rival" in found["owners"][0]["text"]


def test_a_target_that_does_not_exist_is_a_problem(world: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = findings(world, capsys, str(world.policy("ghost", deployment="ghost")))
    assert (code, levels(found)) == (1, {"rights": "ok", "target": "problem"})
    assert "target_not_found" in found["target"][0]["text"]


def test_pages_at_another_port_are_a_problem(world: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]  # nothing listens there
        policy = world.policy(more=f"  signals: {{vllm: {{port: {port}, timeout: 500ms}}}}\n")
        code, found = findings(world, capsys, str(policy))
    assert (code, levels(found)["engines"], levels(found)["decision"]) == (1, "problem", "warning")
    assert "unreachable" in found["engines"][0]["text"]
    assert str(port) in found["engines"][0]["remedy"]
    assert "signals" not in found


def test_a_model_that_no_page_has_is_a_problem(world: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    policy = world.policy(more=f"  signals: {{vllm: {{port: {world.port}, modelName: gpt-2}}}}\n")
    code, found = findings(world, capsys, str(policy))
    assert (code, levels(found)["model"], levels(found)["engines"]) == (1, "problem", "problem")
    assert "Llama-3.1-8B" in found["model"][0]["text"]


def test_cards_and_queries_where_they_are_configured(world: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        server = f"http://127.0.0.1:{taken.getsockname()[1]}"  # nothing listens there
        more = (
            f"  signals:\n    vllm: {{port: {world.port}}}\n    dcgm: {{urls: ['{world.dcgm_url}']}}\n"
            f"    queries: [{{signal: upstream_queue, query: 'sum(q)', server: '{server}'}}]\n"
        )
        _, found = findings(world, capsys, str(world.policy(more=more)))
    assert (levels(found)["cards"], found["cards"][0]["text"].split(";")[0]) == (
        "warning",
        f"cards of 1 of {PODS} ready pods",
    )
    assert "pod labels: exported_pod" in found["cards"][0]["text"]
    (query,) = found["queries"]
    assert "upstream_queue has no answer: " in query["text"]
    assert f"on the server {server}: sum(q)" in query["remedy"]


def test_a_template_that_cannot_drain_and_too_few_cards(world: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert world.api.deployment is not None
    container = world.api.deployment["spec"]["template"]["spec"]["containers"][0]
    container["resources"]["limits"]["nvidia.com/gpu"] = "4"
    del container["lifecycle"]
    world.api.deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] = 30
    code, found = findings(world, capsys, str(world.policy()))
    assert (code, levels(found)["drain"], levels(found)["room"]) == (0, "warning warning", "warning")
    assert "terminationGracePeriodSeconds 30 < preStop 0 + --shutdown-timeout 300" in found["drain"][1]["text"]
    assert "hold 2 replicas of 4" in found["room"][0]["text"]


def test_when_the_api_server_does_not_answer(world: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    for request in (REVIEW, "list deployments", "list pods", "list replicasets", "list horizontalpodautoscalers"):
        world.api.faults[request] = [Fault(status=503)] * 20
    code, found = findings(world, capsys, str(world.policy()))
    assert (code, levels(found)["rights"], levels(found)["target"]) == (1, "unknown", "problem")
    assert "503" in found["rights"][0]["text"]


def test_without_a_cluster_each_policy_says_so(
    world: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world.policy("a")
    world.policy("b", deployment="b")
    assert run(["doctor", str(tmp_path / "policies"), "--kubeconfig", "/no/such/file", "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["counts"] == {"ok": 0, "unknown": 0, "warning": 0, "problem": 2}
    assert [policy["policy"] for policy in said["policies"]] == ["a", "b"]
    assert all("no kubeconfig at" in policy["findings"][0]["text"] for policy in said["policies"])
    assert all("--kubeconfig" in policy["findings"][0]["remedy"] for policy in said["policies"])


def test_for_people_a_line_a_finding_and_what_to_do(world: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    world.api.hpas.append(hpa("rival"))
    assert examine(world, str(world.policy())) == 1
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert "chat  serving/chat" in lines
    (place,) = [number for number, line in enumerate(lines) if line.startswith("  problem  owners")]
    assert lines[place + 1].split("-> ")[1] == "remove one of the two"
    assert "1 problem" in lines[-1]
    assert "\x1b" not in out  # this is no terminal
    assert err == ""


@pytest.mark.parametrize(
    ("environ", "colored"),
    [pytest.param({}, True, id="terminal"), pytest.param({"NO_COLOR": "1"}, False, id="NO_COLOR")],
)
def test_on_a_terminal_it_is_coloured(environ: dict[str, str], colored: bool, world: Cluster) -> None:
    ours, theirs = os.openpty()
    words = (sys.executable, "-c", "from autoscaler.cli import main; main()", "doctor", str(world.policy()))
    process = subprocess.Popen(
        (*words, "--kubeconfig", "/no/such/file"), env={**os.environ, **environ}, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    assert process.wait() == 1
    out = os.read(ours, 65536).decode()
    os.close(ours)
    assert "no kubeconfig at /no/such/file" in out
    assert ("\x1b[31mproblem" in out) == colored
    assert ("\x1b" in out) == colored


def test_a_bad_policy_ends_it_before_anything_is_asked(world: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert examine(world, str(world.policy(replicas="{min: 9, max: 8}"))) == 2
    assert "spec.replicas.min = 9: must not be above replicas.max (8)" in capsys.readouterr().err
    assert world.api.requests == []


def test_a_bug_of_a_source_is_a_finding(
    world: Cluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: object) -> None:
        raise ZeroDivisionError("http://user:secret@host")

    monkeypatch.setattr("autoscaler.sources.vllm.VllmSource.read", broken)
    code, found = findings(world, capsys, str(world.policy()))
    assert (code, levels(found)["bug"]) == (1, "problem")
    assert found["bug"][0]["text"] == "ZeroDivisionError: http://***@host"


def test_the_api_is_closed_whatever_happens(world: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []
    close = KubernetesApi.close

    async def counted(self: KubernetesApi) -> None:
        closed.append(self)
        await close(self)

    monkeypatch.setattr(KubernetesApi, "close", counted)
    world.api.rights = frozenset()
    assert examine(world, str(world.policy())) == 1
    assert len(closed) == 1
