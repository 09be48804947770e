"""cases.md, actuate, against a real API server; a proxy in front of it injects what a healthy one never does.

C106, C110 and a part of C096 are in `test_lease.py` and `test_watch.py`.
"""

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from autoscaler.clock import SystemClock
from autoscaler.core.policy import TargetRef
from autoscaler.errors import TargetError
from autoscaler.sources.cluster import KINDS, ClusterCaches
from autoscaler.sources.deployment import DeploymentTarget
from autoscaler.sources.kubernetes_api import KubernetesApi
from autoscaler.testbed.api import MERGE, ApiError, Json
from tests.cluster.daemon import page, running_daemon, series, total
from tests.cluster.manifests import Place, deployment, eventually, grant, policy
from tests.cluster.proxy import EXPIRED, Proxy
from tests.cluster.site import DEPLOYED, SCALE_WRITE, Site

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
    """Events wait too. A Lease would not: its renewals are a lane of their own, there and here."""
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
        with pytest.raises(TargetError, match="no request for another"):
            await api.request("GET", place.deployments)
        (account / "token").write_text(f"{new}\n")
        await api.request("GET", place.deployments)  # another token ends the wait
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


# --- C098 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [{"late_s": 30.0}, {"drop": "after"}], ids=["late answer", "no answer"])
async def test_c098_write_timed_out_but_applied(
    site: Site, proxy: Proxy, tmp_path: Path, fault: dict[str, Any]
) -> None:
    place = site.place
    await place.create(deployment(replicas=1, fake={"cold-start-seconds": 0.2}))
    rules = policy(
        tmp_path,
        place.plane,
        place.namespace,
        replicas="{min: 3, max: 6}",
        more="  scaleUp: {stabilization: 0s, threshold: 0.6}\n",
    )
    with proxy.rule(method="PATCH", path=SCALE, **fault):
        async with running_daemon(site.kubeconfig, rules) as daemon:
            url = await daemon.url()
            applied = await daemon.until("decision", outcome="applied")
            assert (applied["current_replicas"], applied["desired_replicas"]) == (1, 3)
            pods = await place.until_ready(3)
            await place.tell(pods, rps=2, running=64, kv=0.98, ttft=6)
            held = await daemon.until("decision", reason="held_cooldown")
            assert (held["current_replicas"], held["action"]) == (3, "hold")
            assert await total(url, "tick_errors_total") is None
            assert await daemon.end(signal.SIGTERM) == 0
    (write,) = proxy.asked("PATCH", SCALE)
    (read,) = proxy.asked("GET", SCALE)
    assert read.at > write.at
    assert len(await site.scalings()) == 1
    assert (await place.read())["spec"]["replicas"] == 3


async def test_c098_write_timed_out_and_not_applied(site: Site, proxy: Proxy, tmp_path: Path) -> None:
    """It is not tried again in the same tick: the next one looks and decides afresh."""
    place = site.place
    await place.create(deployment(replicas=1))
    rules = policy(tmp_path, place.plane, place.namespace, replicas="{min: 3, max: 6}")
    with proxy.rule(method="PATCH", path=SCALE, drop="before", times=1):
        async with running_daemon(site.kubeconfig, rules) as daemon:
            await daemon.until("decision", outcome="applied")
            assert await daemon.end(signal.SIGTERM) == 0
    assert [line["outcome"] for line in daemon.of("decision")][:2] == ["failed", "applied"]
    order = [seen.method for seen in proxy.asked(path=SCALE)]
    assert order == ["PATCH", "GET", "PATCH"]
    assert len(await site.scalings()) == 1


# --- C099 -----------------------------------------------------------------------------------------------------------


async def test_c099_pod_list_empty_because_the_list_failed(site: Site, proxy: Proxy, tmp_path: Path) -> None:
    place = site.place
    await place.create(deployment(replicas=6))
    rules = policy(tmp_path, place.plane, place.namespace)
    with proxy.rule(path="/pods$", watch=False, status=429, headers={"Retry-After": "1"}, times=3) as rule:
        async with running_daemon(site.kubeconfig, rules) as daemon:
            url = await daemon.url()
            failed = await daemon.until("tick_failed")
            assert failed["detail"].startswith("throttled")
            while rule.hits < 3:
                answer = await page(url, "/readyz")
                assert (answer.status_code, answer.json()["waiting_for"]) == (503, ["chat"])
                assert (await page(url, "/healthz")).status_code == 200
                await asyncio.sleep(0.1)
            first = await daemon.until("decision")
            assert (first["current_replicas"], first["action"]) == (6, "hold")
            assert (await page(url, "/readyz")).status_code == 200
            assert await daemon.end(signal.SIGTERM) == 0
    synced = [seen.at for seen in proxy.asked(path="/pods$", watch=False) if seen.status == 200]
    assert daemon.seen.index(first) == min(daemon.seen.index(line) for line in daemon.of("decision"))
    assert len(synced) == 1
    assert await site.scalings() == []


async def test_c099_no_pods_are_no_reason_to_shrink(site: Site, tmp_path: Path) -> None:
    place = site.place
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "none"}, "spec": {"hard": {"pods": "0"}}}
    await place.api.request("POST", f"/api/v1/namespaces/{place.namespace}/resourcequotas", quota)
    await place.create(deployment(replicas=6))
    rules = policy(tmp_path, place.plane, place.namespace)
    async with running_daemon(site.kubeconfig, rules) as daemon:
        for _ in range(3):
            held = await daemon.until("decision", current_replicas=6, ready_replicas=0)
            assert (held["action"], held["desired_replicas"]) == ("hold", 6)
        assert await daemon.end(signal.SIGTERM) == 0
    assert {line["reason"] for line in daemon.of("decision")} == {"no_ready_pods"}
    assert await site.scalings() == []


# --- C102 -----------------------------------------------------------------------------------------------------------


async def test_c102_target_deleted(site: Site, tmp_path: Path) -> None:
    place = site.place
    await place.create(deployment(replicas=1))
    await place.create(deployment("code", replicas=1))
    rules = [policy(tmp_path, place.plane, place.namespace, name=name) for name in ("chat", "code")]
    async with running_daemon(site.kubeconfig, *rules) as daemon:
        url = await daemon.url()
        await daemon.until("decision", policy="chat", ready_replicas=1)
        await daemon.until("decision", policy="code", ready_replicas=1)
        seen = {name for (name, labels) in await series(url) if ("policy", "chat") in labels}
        assert {"current_replicas", "ready_replicas", "desired_replicas", "score"} <= seen
        await place.api.request("DELETE", f"{place.deployments}/chat")
        gone = await daemon.until("tick_failed", policy="chat")
        assert gone["detail"].startswith("target_not_found")
        for _ in range(4):
            await daemon.until("decision", policy="code")
        left = {name for (name, labels) in await series(url) if ("policy", "chat") in labels}
        assert left.isdisjoint({"current_replicas", "ready_replicas", "desired_replicas", "score", "score_part"})
        assert await total(url, "current_replicas", policy="code") == 1.0
        assert (await total(url, "tick_errors_total", policy="chat", kind="target_not_found") or 0.0) >= 3.0
        assert (await page(url, "/healthz")).status_code == (await page(url, "/readyz")).status_code == 200
        await place.create(deployment(replicas=1))
        await daemon.until("decision", policy="chat", ready_replicas=1)
        assert await daemon.end(signal.SIGTERM) == 0
    (said,) = daemon.of("tick_failed")
    assert "exception" not in said
    code = [line["at"] for line in daemon.of("decision") if line["policy"] == "code"]
    assert max(later - one for one, later in pairwise(code)) < 3.0


# --- C104 -----------------------------------------------------------------------------------------------------------


async def test_c104_rbac_forbids_the_write(place: Place, proxy: Proxy, tmp_path: Path) -> None:
    await place.create(deployment(replicas=1))
    await grant(place, DEPLOYED - {SCALE_WRITE})
    token = await place.plane.token_for(place.namespace, "subject")
    kubeconfig = proxy.kubeconfig_for(token, tmp_path / "kubeconfig")
    rules = policy(tmp_path, place.plane, place.namespace, replicas="{min: 3, max: 4}")
    async with running_daemon(kubeconfig, rules) as daemon:
        url = await daemon.url()
        missing = await daemon.until("right_missing")
        assert missing["right"] == f"patch deployments/scale in namespace {place.namespace}"
        failed = await daemon.until("tick_failed")
        assert (failed["kind"], failed["detail"].split(":")[0]) == ("actuation", "forbidden")
        assert 'cannot patch resource "deployments' in failed["detail"]
        for _ in range(4):
            wanted = await daemon.until("decision")
            assert (wanted["desired_replicas"], wanted["reason"], wanted["outcome"]) == (3, "up_bounds", "failed")
        assert await total(url, "write_forbidden", policy="chat") == 1.0
        assert (await total(url, "tick_errors_total", kind="forbidden") or 0.0) >= 4.0
        assert await total(url, "actions_total", outcome="applied") is None
        assert (await page(url, "/healthz")).status_code == (await page(url, "/readyz")).status_code == 200
        assert await daemon.end(signal.SIGTERM) == 0
    assert [seen.status for seen in proxy.asked("PATCH", SCALE)] == [403]
    assert len(daemon.of("tick_failed")) <= 2  # what was said before the first tick is said again after it
