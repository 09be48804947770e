"""What is shipped for a cluster: the manifests, and the image as far as it can be judged without building it."""

import re
import tomllib
from collections.abc import AsyncIterator
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes_asyncio.client import Configuration

from autoscaler.actuators.deletion_cost import RIGHTS as MARKS
from autoscaler.actuators.deployment import RIGHTS as WRITES
from autoscaler.actuators.deployment import DeploymentActuator
from autoscaler.actuators.events import RIGHTS as TELLS
from autoscaler.actuators.rollout import RIGHTS as ROLLS
from autoscaler.cli.main import run as command_line
from autoscaler.clock import SystemClock
from autoscaler.core.policy import TargetRef
from autoscaler.core.types import Outcome, ScaleReplicas
from autoscaler.errors import ActuationError
from autoscaler.lease import RIGHTS as ELECTS
from autoscaler.policy_file import load_policies
from autoscaler.sources.cluster import ClusterCaches
from autoscaler.sources.deployment import RIGHTS as READS
from autoscaler.sources.deployment import DeploymentTarget
from autoscaler.sources.kubernetes_api import KubernetesApi
from autoscaler.sources.pod_template import drain_of, max_num_seqs_of
from autoscaler.vllm_plugin.files import FOLDER_VARIABLE
from autoscaler.vllm_plugin.route import TOKEN_FILE_VARIABLE
from tests.fake_api import FakeApi, FakeClock, Json, Right, json_patch, pod

ROOT = Path(__file__).parent.parent
BASE = ROOT / "deploy" / "base"
LIVE = ROOT / "deploy" / "overlays" / "live"
GENTLE = ROOT / "deploy" / "components" / "gentle"
ROLLOUT = ROOT / "deploy" / "components" / "rollout"
ENGINE = ROOT / "deploy" / "vllm"
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def documents(*folders: Path) -> list[Json]:
    """Return the manifests that the folders' kustomizations name, overlays' patches not applied."""
    found = []
    for folder in folders:
        for resource in kustomization(folder)["resources"]:
            if (folder / resource).is_file():
                found += [item for item in yaml.safe_load_all((folder / resource).read_text()) if item]
    return found


def kustomization(folder: Path) -> Json:
    content: Json = yaml.safe_load((folder / "kustomization.yaml").read_text())
    return content


def manifest(kind: str, name: str, *folders: Path) -> Json:
    (found,) = [item for item in documents(*folders) if item["kind"] == kind and item["metadata"]["name"] == name]
    return found


def rights(*folders: Path) -> set[Right]:
    """Return what the folders' Roles grant, and check that each is bound to the service account."""
    granted = set()
    for role in (item for item in documents(*folders) if item["kind"] == "Role"):
        binding = manifest("RoleBinding", role["metadata"]["name"], *folders)
        assert binding["roleRef"]["name"] == role["metadata"]["name"]
        assert [subject["name"] for subject in binding["subjects"]] == ["autoscaler"]
        for rule in role["rules"]:
            assert set(rule) == {"apiGroups", "resources", "verbs"}
            granted |= {(g, r, v) for g in rule["apiGroups"] for r in rule["resources"] for v in rule["verbs"]}
    return granted


@pytest.fixture
def deployment() -> Json:
    return manifest("Deployment", "autoscaler", BASE)


@pytest.fixture
def container(deployment: Json) -> Json:
    (only,) = deployment["spec"]["template"]["spec"]["containers"]
    return dict(only)


@pytest.mark.parametrize("folder", [BASE, LIVE, GENTLE, ROLLOUT, ENGINE], ids=lambda folder: folder.name)
def test_all_that_a_kustomization_names_is_there_and_nothing_else(folder: Path) -> None:
    content = kustomization(folder)
    generated = [file for entry in content.get("configMapGenerator", []) for file in entry["files"]]
    patches = [patch["path"] for patch in content.get("patches", [])]
    named = {*content["resources"], *generated, *patches, "kustomization.yaml"}
    there = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert {name for name in named if not (folder / name).is_dir()} == there
    assert all((folder / name).exists() for name in named)
    for path in folder.rglob("*.yaml"):
        assert list(yaml.safe_load_all(path.read_text()))


def test_nothing_is_cluster_wide_and_every_label_selects() -> None:
    kinds = {item["kind"] for item in documents(BASE, LIVE, GENTLE, ROLLOUT)}
    assert kinds == {"ServiceAccount", "Role", "RoleBinding", "Deployment", "NetworkPolicy"}
    assert all("namespace" not in item["metadata"] for item in documents(BASE, LIVE, GENTLE, ROLLOUT))
    assert kustomization(BASE)["namespace"] == kustomization(LIVE)["namespace"]
    labels = {"app.kubernetes.io/name": "autoscaler"}
    assert all(item["metadata"]["labels"] == labels for item in documents(BASE, LIVE, GENTLE, ROLLOUT))
    spec = manifest("Deployment", "autoscaler", BASE)["spec"]
    assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"] == labels
    assert manifest("NetworkPolicy", "autoscaler", BASE)["spec"]["podSelector"]["matchLabels"] == labels


def test_the_roles_grant_what_the_code_uses_and_no_more() -> None:
    assert rights(BASE) == READS
    assert rights(BASE, LIVE) == READS | WRITES | TELLS | ELECTS
    assert rights(GENTLE) == MARKS
    assert rights(ROLLOUT) == ROLLS


@pytest.fixture
async def fake() -> AsyncIterator[FakeApi]:
    async with FakeApi().serve() as server:
        server.pods = [pod("a"), pod("b")]
        yield server


@pytest.mark.parametrize("live", [False, True], ids=["base", "live"])
async def test_the_roles_let_read_and_only_live_lets_write(fake: FakeApi, live: bool) -> None:
    fake.rights = frozenset(rights(BASE, LIVE) if live else rights(BASE))
    api = KubernetesApi(Configuration(host=fake.url), FakeClock(), timeout_s=5.0)
    ref = TargetRef(deployment="chat", namespace="serving")
    target = DeploymentTarget(ClusterCaches(api, SystemClock()), ref)
    status = await target.read()
    assert (len(status.pods), target.hpa_visible) == (2, True)
    action, actuator = ScaleReplicas(seen=2, to=3, uid=status.uid), DeploymentActuator(api, ref)
    if live:
        assert await actuator.apply(action) is Outcome.APPLIED
    else:
        with pytest.raises(ActuationError) as caught:
            await actuator.apply(action)
        assert caught.value.reason == "forbidden"
    assert (await target.read()).current_replicas == (3 if live else 2)
    await target.close()
    await api.close()


def test_base_is_in_dry_run_and_live_is_not(deployment: Json) -> None:
    arguments = ["run", "/etc/autoscaler/policies", "--dry-run", "--listen", "0.0.0.0:9090"]
    assert deployment["spec"]["template"]["spec"]["containers"][0]["args"] == arguments
    patch = yaml.safe_load((LIVE / "no-dry-run.yaml").read_text())
    changed = json_patch(deployment, patch)
    arguments.remove("--dry-run")
    assert changed["spec"]["template"]["spec"]["containers"][0].pop("args") == arguments
    deployment["spec"]["template"]["spec"]["containers"][0].pop("args")
    assert changed == deployment


def test_live_runs_two_replicas_with_a_lease_between_them(deployment: Json) -> None:
    changed = json_patch(deployment, yaml.safe_load((LIVE / "lease.yaml").read_text()))
    assert changed["spec"]["replicas"] == 2
    pod_spec = changed["spec"]["template"]["spec"]
    (before,) = deployment["spec"]["template"]["spec"]["containers"]
    (after,) = pod_spec["containers"]
    assert after["args"] == [*before["args"], "--lease", "$(POD_NAMESPACE)/autoscaler"]
    where = {"name": "POD_NAMESPACE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}}}
    assert after["env"] == [*before["env"], where]
    (apart,) = pod_spec["affinity"]["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert apart["podAffinityTerm"]["labelSelector"]["matchLabels"] == changed["spec"]["selector"]["matchLabels"]


def test_one_replica_and_never_two(deployment: Json) -> None:
    assert deployment["spec"]["replicas"] == 1
    assert deployment["spec"]["strategy"] == {"type": "Recreate"}


def test_the_security_context_is_strict(deployment: Json, container: Json) -> None:
    pod_spec = deployment["spec"]["template"]["spec"]
    assert pod_spec["securityContext"]["runAsNonRoot"] is True
    assert pod_spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod_spec)
    assert container["volumeMounts"] == [
        {"name": "policies", "mountPath": "/etc/autoscaler/policies", "readOnly": True}
    ]
    assert manifest("ServiceAccount", "autoscaler", BASE)["automountServiceAccountToken"] is False
    assert (pod_spec["serviceAccountName"], pod_spec["automountServiceAccountToken"]) == ("autoscaler", True)


def test_probes_and_resources(container: Json) -> None:
    (port,) = container["ports"]
    assert (port["name"], port["containerPort"]) == ("http", 9090)
    paths = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")}
    assert paths == {
        "startup": {"path": "/healthz", "port": "http"},
        "liveness": {"path": "/healthz", "port": "http"},
        "readiness": {"path": "/readyz", "port": "http"},
    }
    assert set(container["resources"]["requests"]) == {"cpu", "memory"}
    assert set(container["resources"]["limits"]) == {"memory"}


def test_the_network_policy_opens_what_is_used() -> None:
    spec = manifest("NetworkPolicy", "autoscaler", BASE)["spec"]
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    assert spec["ingress"] == [{"ports": [{"protocol": "TCP", "port": 9090}]}]
    opened = {(entry["protocol"], entry["port"]) for rule in spec["egress"] for entry in rule["ports"]}
    assert opened == {("UDP", 53), ("TCP", 53), ("TCP", 443), ("TCP", 6443), ("TCP", 8000), ("TCP", 9090)}
    unbound = [rule["ports"] for rule in spec["egress"] if "to" not in rule]
    assert unbound == [[{"protocol": "TCP", "port": 443}, {"protocol": "TCP", "port": 6443}]]


def test_the_policies_are_mounted_where_they_are_looked_for(deployment: Json, container: Json) -> None:
    (generator,) = kustomization(BASE)["configMapGenerator"]
    (volume,) = deployment["spec"]["template"]["spec"]["volumes"]
    assert volume["configMap"]["name"] == generator["name"]
    assert generator["options"] == {"disableNameSuffixHash": True}
    assert container["volumeMounts"][0]["mountPath"] in container["args"]


def test_the_policies_are_good_and_fit_the_manifests() -> None:
    (generator,) = kustomization(BASE)["configMapGenerator"]
    loaded = load_policies([BASE / file for file in generator["files"]])
    assert loaded.warnings == ()
    (policy,) = loaded.policies.values()
    assert policy.target.namespace == kustomization(BASE)["namespace"]
    assert policy.signals.vllm is not None
    egress = manifest("NetworkPolicy", "autoscaler", BASE)["spec"]["egress"]
    engines = {"to": [{"podSelector": {}}], "ports": [{"protocol": "TCP", "port": policy.signals.vllm.port}]}
    assert engines in egress


@pytest.fixture
def engine() -> Json:
    """Return the example of an engine with the plugin."""
    return manifest("Deployment", "vllm-chat", ENGINE)


def test_the_engine_is_the_one_that_the_policy_names(engine: Json) -> None:
    (policy,) = load_policies([BASE / "policies" / "chat.yaml"]).policies.values()
    assert policy.signals.vllm is not None
    (container,) = engine["spec"]["template"]["spec"]["containers"]
    assert (engine["metadata"]["name"], kustomization(ENGINE)["namespace"]) == (
        policy.target.deployment,
        policy.target.namespace,
    )
    assert container["ports"] == [{"name": "http", "containerPort": policy.signals.vllm.port}]
    assert "replicas" not in engine["spec"]
    assert engine["spec"]["selector"]["matchLabels"] == engine["spec"]["template"]["metadata"]["labels"]


def test_the_engine_can_drain(engine: Json) -> None:
    template = engine["spec"]["template"]
    drain = drain_of(template)
    assert (drain.pre_stop_s, drain.drain_s) == (15.0, 120.0)
    assert drain.grace_s > 15.0 + 120.0
    assert max_num_seqs_of(template["spec"]["containers"]) == 256
    assert engine["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    (container,) = template["spec"]["containers"]
    assert {container[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "liveness", "readiness")} == {
        "/health"
    }


def test_the_engine_finds_the_plugin_that_its_init_container_installs(engine: Json, tmp_path: Path) -> None:
    pod_spec = engine["spec"]["template"]["spec"]
    (init,), (container,) = pod_spec["initContainers"], pod_spec["containers"]
    (image,) = kustomization(ENGINE)["images"]
    assert image == kustomization(BASE)["images"][0]
    command, directory = init["args"]
    assert (init["image"], command) == (image["name"], "plugin-install")
    assert command_line([command, str(tmp_path)]) == 0
    (found,) = distributions(path=[str(tmp_path)])
    variables = {item["name"]: item["value"] for item in container["env"]}
    assert variables["PYTHONPATH"] == directory
    assert {variables["VLLM_PLUGINS"]} == {point.name for point in found.entry_points}
    volumes = {item["mountPath"]: item["name"] for item in container["volumeMounts"]}
    assert {item["mountPath"]: item["name"] for item in init["volumeMounts"]} == {directory: volumes[directory]}
    assert volumes[variables[FOLDER_VARIABLE]] == "limits"
    folder, _, file = variables[TOKEN_FILE_VARIABLE].rpartition("/")
    assert (volumes[folder], file) == ("token", "token")
    sources = {volume["name"]: set(volume) - {"name"} for volume in pod_spec["volumes"]}
    assert sources == {name: {"secret"} if name == "token" else {"emptyDir"} for name in volumes.values()}
    assert [item["kind"] for item in documents(ENGINE)] == ["Deployment"]


def stages() -> list[list[list[str]]]:
    """Return the Dockerfile's stages, each a list of instructions, each an instruction's words."""
    text = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", DOCKERFILE, flags=re.MULTILINE))
    found: list[list[list[str]]] = []
    for words in (line.split() for line in text.splitlines() if line.strip()):
        if words[0] == "FROM":
            found.append([])
        found[-1].append(words)
    return found


def test_the_image_is_that_of_the_manifests(deployment: Json, container: Json) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (image,) = kustomization(BASE)["images"]
    assert (image["name"], image["newTag"]) == (container["image"], project["version"])
    final: dict[str, Any] = {words[0]: words[1:] for words in stages()[-1]}
    identity = deployment["spec"]["template"]["spec"]["securityContext"]
    assert final["USER"] == [f"{identity['runAsUser']}:{identity['runAsGroup']}"]
    assert final["ENTRYPOINT"] == ['["autoscaler"]']
    assert "RUN" not in final
    assert final["COPY"][0] == "--from=install"


def test_the_image_stages_build_on_each_other() -> None:
    names = ["python:3.12-slim"]
    for (_, base, *alias), *instructions in stages():
        assert base in names
        copied = [
            word.removeprefix("--from=") for words in instructions for word in words if word.startswith("--from=")
        ]
        assert set(copied) <= set(names)
        names += alias[1:]


def test_the_build_sees_what_it_copies_and_nothing_else() -> None:
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert lines[0] == "*"
    seen = {line.removeprefix("!") for line in lines if line.startswith("!")}
    copies = [words[1:-1] for stage in stages() for words in stage if words[0] == "COPY" and "--from" not in words[1]]
    assert {source for sources in copies for source in sources} == seen
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {
        *wheel["packages"],
        *wheel["force-include"],
        project["project"]["readme"],
        *project["project"]["license-files"],
    }
    assert needed <= seen
    assert lines[-1] == "**/__pycache__"
