"""Where the demo on a control plane happens: nodes, a namespace with an account, and a Deployment of engines."""

from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass

import yaml

from autoscaler.cli.doctor import needed_rights
from autoscaler.core.policy import Policy
from autoscaler.lease import LEASES, RELEASED_S
from autoscaler.lease import RIGHTS as ELECTS
from autoscaler.sim.scenario import Scenario
from autoscaler.testbed.accounts import Right, grant
from autoscaler.testbed.api import Api, Json
from autoscaler.testbed.kubelet import PREFIX, FakeKubelet, Settings
from autoscaler.testbed.plane import GPUS, NODES, Plane, free_network
from autoscaler.testbed.simulated import Traffic

ACCOUNT = LEASE = "autoscaler"


@asynccontextmanager
async def nodes(plane: Plane, traffic: Traffic) -> AsyncIterator[None]:
    """Run a fake kubelet here, whose pods are simulated engines that share the traffic."""
    settings = Settings(
        nodes=tuple(f"gpu-{number}" for number in range(NODES)),
        gpus=GPUS,
        network=free_network(),
        port=plane.port,
        pull_s=0.5,
    )
    async with FakeKubelet(plane.api(), settings, engine=traffic.engine, told=lambda **_: None):
        yield


@dataclass(frozen=True, slots=True)
class Place:
    """Where the Deployment is."""

    plane: Plane
    api: Api
    namespace: str
    deployment: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.deployment}"

    @property
    def user(self) -> str:
        """The daemons' account."""
        return f"system:serviceaccount:{self.namespace}:{ACCOUNT}"

    async def fill(self, scenario: Scenario, rights: Collection[Right]) -> None:
        """Make the account with its rights, the Lease, and what there is to scale."""
        await self.api.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": self.namespace}})
        await self.plane.until(self._has_account, "account for pods")
        await grant(self.api, self.namespace, ACCOUNT, rights)
        # As a leader leaves it that has ended well, so that the first need not wait.
        lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": LEASE}}
        spec = {"holderIdentity": "", "leaseDurationSeconds": RELEASED_S}
        await self.api.request("POST", LEASES.format(namespace=self.namespace), {**lease, "spec": spec})
        manifest = deployment_of(self.deployment, scenario)
        await self.api.request("POST", self._deployments, manifest, query={"fieldValidation": "Strict"})

    async def is_ready(self) -> bool:
        """Return whether a pod of the Deployment is ready."""
        status = (await self.api.get(f"{self._deployments}/{self.deployment}"))["status"]
        return bool(status.get("readyReplicas"))

    @property
    def _deployments(self) -> str:
        return f"/apis/apps/v1/namespaces/{self.namespace}/deployments"

    async def _has_account(self) -> bool:
        return bool(await self.api.items(f"/api/v1/namespaces/{self.namespace}/serviceaccounts"))


def rights_of(policy: Policy) -> frozenset[Right]:
    """Return what a daemon of that policy asks of the API server, which is what deploy/ grants it."""
    marking = policy.scale_down.victims.order != "cluster"
    return needed_rights(acting=True, marking=marking, rolling=policy.batching.rolls_out) | ELECTS


def deployment_of(name: str, scenario: Scenario) -> Json:
    """Return the manifest of a Deployment of engines."""
    profile = scenario.profile
    limits = {"max-num-seqs": profile.max_num_seqs, "max-num-batched-tokens": profile.max_num_batched_tokens}
    container = {
        "name": "vllm",
        "image": "vllm/vllm-openai",
        "args": [word for key, limit in limits.items() for word in (f"--{key}", str(limit))],
        "resources": {"limits": {"nvidia.com/gpu": str(profile.gpus)}},
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name},
        "spec": {
            "replicas": scenario.replicas,
            "selector": {"matchLabels": {"app": name}},
            "template": {
                "metadata": {
                    "labels": {"app": name},
                    "annotations": {f"{PREFIX}cold-start-seconds": f"{profile.cold_start_s:g}"},
                },
                "spec": {"terminationGracePeriodSeconds": 60, "containers": [container]},
            },
        },
    }


def served_policy(text: str, port: int) -> str:
    """Return a policy file that reads the engines' pages at this port, and nothing else."""
    document = yaml.safe_load(text)
    signals = document["spec"].get("signals") or {}
    vllm = {key: value for key, value in (signals.get("vllm") or {}).items() if key != "prometheus"}
    document["spec"]["signals"] = {"vllm": vllm | {"port": port}}
    return yaml.safe_dump(document, sort_keys=False)
