"""cases.md, actuate, against a real API server; a proxy in front of it injects what a healthy one never does.

C106, C110 and a part of C096 are in `test_lease.py` and `test_watch.py`.
"""

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path

import pytest

from autoscaler.clock import SystemClock
from autoscaler.core.policy import TargetRef
from autoscaler.errors import TargetError
from autoscaler.sources.cluster import KINDS, ClusterCaches
from autoscaler.sources.deployment import DeploymentTarget
from autoscaler.sources.kubernetes_api import KubernetesApi
from autoscaler.testbed.api import MERGE, ApiError, Json
from tests.cluster.daemon import page, running_daemon, total
from tests.cluster.manifests import Place, deployment, eventually, grant, policy
from tests.cluster.proxy import EXPIRED, Proxy
from tests.cluster.site import DEPLOYED, Site

SCALE = "/deployments/chat/scale$"


@pytest.fixture
async def site(place: Place, proxy: Proxy, tmp_path: Path) -> Site:
    """Return a namespace with an account that has the rights of deploy/overlays/live, and is behind the proxy."""
    await grant(place, DEPLOYED)
    token = await place.plane.token_for(place.namespace, "subject")
    user = f"system:serviceaccount:{place.namespace}:subject"
    return Site(place, proxy.kubeconfig_for(token, tmp_path / "kubeconfig"), user)


async def set_replicas(place: Place, replicas: int, name: str = "chat") -> None:
    """Set the replicas as a person would."""
    await place.api.request(
        "PATCH", f"{place.deployments}/{name}", {"spec": {"replicas": replicas}}, content_type=MERGE
    )


async def until_watching(proxy: Proxy, count: int = len(KINDS)) -> None:
    """Return once so many watches are open."""

    async def are_open() -> bool:
        return proxy.watches() >= count

    await eventually(are_open, f"{count} open watches")


# --- C090 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("conflicts", [pytest.param(1, id="once"), pytest.param(6, id="for three ticks")])
async def test_c090_conflict_on_write(site: Site, proxy: Proxy, tmp_path: Path, conflicts: int) -> None:
    place = site.place
    await place.create(deployment(replicas=1))
    rules = policy(tmp_path, place.plane, place.namespace, replicas="{min: 3, max: 4}")
    with proxy.rule(method="PATCH", path=SCALE, status=409, times=conflicts):
        async with running_daemon(site.kubeconfig, rules) as daemon:
            url = await daemon.url()
            applied = await daemon.until("decision", outcome="applied")
            assert await total(url, "tick_errors_total", kind="conflict") == conflicts
            assert await daemon.end(signal.SIGTERM) == 0
    failed = [line for line in daemon.of("decision") if line["outcome"] == "failed"]
    assert (len(failed), applied["desired_replicas"]) == (conflicts // 2, 3)  # two writes a tick at the most
    assert len(proxy.asked("PATCH", SCALE)) == conflicts + 1
    rereads = [seen for seen in proxy.asked("GET", "/deployments$") if "fieldSelector" in seen.query]
    assert len(rereads) >= conflicts
    (write,) = await site.scalings()
    assert isinstance(write.sent, list)
    changes = [step for step in write.sent if step["op"] != "test"]
    assert changes == [{"op": "replace", "path": "/spec/replicas", "value": 3}]


# --- C092 -----------------------------------------------------------------------------------------------------------


async def test_c092_throttled_with_retry_after(site: Site, proxy: Proxy, tmp_path: Path) -> None:
    place = site.place
    await place.create(deployment(replicas=3))
    rules = policy(tmp_path, place.plane, place.namespace, replicas="{min: 3, max: 4}")
    async with running_daemon(site.kubeconfig, rules) as daemon:
        url = await daemon.url()
        await daemon.until("decision", current_replicas=3)
        await until_watching(proxy)
        with proxy.rule(method="PATCH", path=SCALE, status=429, headers={"Retry-After": "7"}, times=1):
            await set_replicas(place, 1)
            failed = await daemon.until("tick_failed")
            assert (failed["kind"], failed["detail"].split(":")[0]) == ("actuation", "throttled")
        (throttled,) = proxy.asked("PATCH", SCALE)
        while time.monotonic() < throttled.at + 6.0:
            assert (await page(url, "/healthz")).status_code == (await page(url)).status_code == 200
            await asyncio.sleep(0.5)
        assert (await total(url, "tick_errors_total", kind="throttled") or 0.0) >= 1.0
        await daemon.until("decision", outcome="applied")
        assert await daemon.end(signal.SIGTERM) == 0
    later = [seen.at - throttled.at for seen in proxy.seen if seen.at > throttled.at]
    assert min(later) >= 7.0
    outcomes = [line["outcome"] for line in daemon.of("decision") if line["current_replicas"] == 1]
    assert set(outcomes[:-1]) == {"failed"}
    assert len(proxy.asked("PATCH", SCALE)) == 2


# --- C094 -----------------------------------------------------------------------------------------------------------


async def bound_token(place: Place, name: str) -> str:
    """Return a token that lives as long as a Secret of that name does."""
    root = f"/api/v1/namespaces/{place.namespace}"
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}}
    made = await place.api.request("POST", f"{root}/secrets", secret)
    reference = {"apiVersion": "v1", "kind": "Secret", "name": name, "uid": made["metadata"]["uid"]}
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"boundObjectRef": reference}}
    answer = await place.api.request("POST", f"{root}/serviceaccounts/subject/token", request)
    return str(answer["status"]["token"])


async def is_refused(place: Place, token: str) -> bool:
    async with place.plane.api(token) as api:
        try:
            await api.get(place.deployments)
        except ApiError as error:
            return error.status == 401
    return False


async def test_c094_service_account_token_rotated_on_disk(site: Site, tmp_path: Path) -> None:
    """The account's folder is the one of a pod; the API server refuses a token whose Secret has gone."""
    place = site.place
    await place.create(deployment(replicas=0))
    old, new = await bound_token(place, "old"), await bound_token(place, "new")
    account = tmp_path / "account"
    account.mkdir()
    (account / "ca.crt").write_text((place.plane.folder / "ca.crt").read_text())
    (account / "token").write_text(f"{old}\n")
    host, _, port = place.plane.url.removeprefix("https://").partition(":")
    environ = {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}
    api = await KubernetesApi.connect(SystemClock(), environ=environ, account=account)
    try:
        await api.request("GET", place.deployments)
        (account / "token").write_text(f"{new}\n")
        await api.request("GET", place.deployments)
        used = [event.credential for event in await site.requests() if event.right == ("apps", "deployments", "list")]
        assert len(used) == len(set(used)) == 2  # at once, not within a minute
        (account / "token").write_text(f"{old}\n")
        await place.api.request("DELETE", f"/api/v1/namespaces/{place.namespace}/secrets/old")
        await eventually(lambda: is_refused(place, old), "end of the old token")
        with pytest.raises(TargetError) as caught:
            await api.request("GET", place.deployments)
        assert (caught.value.reason, caught.value.retry_after_s) == ("unauthorized", 5.0)
        (account / "token").write_text(f"{new}\n")
        with pytest.raises(TargetError, match="no request for another"):
            await api.request("GET", place.deployments)
        await asyncio.sleep(5.0)
        await api.request("GET", place.deployments)
    finally:
        await api.close()


async def test_c094_a_daemon_that_is_refused_waits_and_goes_on(site: Site, proxy: Proxy, tmp_path: Path) -> None:
    place = site.place
    await place.create(deployment(replicas=2))
    rules = policy(tmp_path, place.plane, place.namespace)
    async with running_daemon(site.kubeconfig, rules) as daemon:
        url = await daemon.url()
        await daemon.until("decision", current_replicas=2)
        await until_watching(proxy)
        with proxy.rule(status=401):
            since = time.monotonic()
            proxy.cut()
            failed = await daemon.until("tick_failed")
            assert failed["detail"].startswith("unauthorized")
            assert (await page(url, "/healthz")).status_code == 200
            await asyncio.sleep(2.0)
            # Each of the streams may have asked at the same moment, and each once more with credentials read anew.
            assert 2 <= len(proxy.asked(since=since)) <= 2 * len(KINDS)
        assert (await daemon.until("decision"))["current_replicas"] == 2
        assert min(seen.at - since for seen in proxy.asked(since=since) if seen.status == 200) >= 4.0
        assert await daemon.end(signal.SIGTERM) == 0
    assert await site.scalings() == []


# --- C096 -----------------------------------------------------------------------------------------------------------


@pytest.fixture
async def product(site: Site) -> AsyncIterator[KubernetesApi]:
    """Return the product's client behind the proxy."""
    api = await KubernetesApi.connect(SystemClock(), kubeconfig=str(site.kubeconfig), environ={})
    yield api
    await api.close()


def chat(place: Place, api: KubernetesApi) -> DeploymentTarget:
    """Return the target with that name, not yet read."""
    return DeploymentTarget(ClusterCaches(api, SystemClock()), TargetRef(namespace=place.namespace, deployment="chat"))


@pytest.mark.parametrize("how", ["in the stream", "as a status"])
async def test_c096_gone(site: Site, proxy: Proxy, product: KubernetesApi, how: str) -> None:
    place = site.place
    await place.create(deployment(replicas=1))
    await place.until_ready(1)
    target = DeploymentTarget(
        ClusterCaches(product, SystemClock()), TargetRef(namespace=place.namespace, deployment="chat")
    )
    before = await target.read()
    await until_watching(proxy)
    (first,) = proxy.asked(path="/pods$", watch=True)
    version = str(int(first.query["resourceVersion"]) + 1)
    assert await proxy.tell(bookmark(version), "/pods$") == 1
    await set_replicas(place, 2)
    await place.until_ready(2)
    since = time.monotonic()
    if how == "in the stream":
        for _ in range(3):
            await proxy.tell(EXPIRED, "/pods$")
            await asyncio.sleep(0.5)
    else:
        with proxy.rule(path="/pods$", watch=True, status=410, times=3) as rule:
            proxy.end("/pods$")

            async def is_used_up() -> bool:
                return rule.hits == 3

            await eventually(is_used_up, "three refusals")
    await until_watching(proxy)
    assert {pod.ready for pod in (await target.read()).pods} == {True}
    lists, watches = proxy.asked(path="/pods$", watch=False, since=since), proxy.asked("GET", "/pods$", True, since)
    versions = [int(seen.query["resourceVersion"]) for seen in watches if seen.status == 200]
    assert min(versions) > int(version)  # of the list, never the old one
    assert len(lists) >= 1
    assert min(later.at - one.at for one, later in pairwise(lists)) > 0.9
    assert len(before.pods) == 1
    await target.close()


def bookmark(version: str) -> Json:
    """Return what a server says when nothing else is to be said."""
    return {"type": "BOOKMARK", "object": {"kind": "Pod", "metadata": {"resourceVersion": version}}}


async def test_c096_a_bookmark_only_moves_the_version(site: Site, proxy: Proxy, product: KubernetesApi) -> None:
    place = site.place
    await place.create(deployment(replicas=1))
    await place.until_ready(1)
    target = DeploymentTarget(
        ClusterCaches(product, SystemClock()), TargetRef(namespace=place.namespace, deployment="chat")
    )
    before = await target.read()
    await until_watching(proxy)
    version = (await place.api.get(place.pods))["metadata"]["resourceVersion"]
    await proxy.tell(bookmark(version), "/pods$")
    since = time.monotonic()
    proxy.end("/pods$")

    async def is_opened() -> bool:
        return bool(proxy.asked(path="/pods$", watch=True, since=since))

    await eventually(is_opened, "another watch")
    (again,) = proxy.asked(path="/pods$", since=since)
    assert (again.watch, again.query["resourceVersion"]) == (True, version)
    assert (await target.read()).pods == before.pods
    await target.close()
