"""The proxy itself: what it lets through is the real server's, and each fault is what it says."""

import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from autoscaler.clock import SystemClock
from autoscaler.errors import TargetError
from autoscaler.sources.kubernetes_api import KubernetesApi
from autoscaler.testbed.api import MERGE
from tests.cluster.manifests import Place, deployment, eventually, grant
from tests.cluster.proxy import EXPIRED, Proxy

WRITE = ("apps", "deployments/scale", "patch")


@pytest.fixture
async def product(place: Place, proxy: Proxy, tmp_path: Path) -> AsyncIterator[KubernetesApi]:
    """Return the product's client behind the proxy, with three rights."""
    await grant(place, [("apps", "deployments", "list"), ("apps", "deployments", "watch"), WRITE])
    token = await place.plane.token_for(place.namespace, "subject")
    kubeconfig = str(proxy.kubeconfig_for(token, tmp_path / "kubeconfig"))
    api = await KubernetesApi.connect(SystemClock(), kubeconfig=kubeconfig, environ={}, timeout_s=1.5)
    yield api
    await api.close()


async def test_what_it_lets_through_is_the_servers(place: Place, proxy: Proxy, product: KubernetesApi) -> None:
    await place.create(deployment(replicas=0))
    path = f"{place.deployments}/chat"
    with pytest.raises(TargetError) as caught:  # the client's own credentials
        await product.request("DELETE", path)
    assert caught.value.reason == "forbidden"
    listing = await product.request("GET", place.deployments)
    assert [item["metadata"]["name"] for item in listing["items"]] == ["chat"]
    async with product.watch(place.deployments, listing["metadata"]["resourceVersion"], 10) as events:
        await place.api.request("PATCH", path, {"metadata": {"labels": {"a": "b"}}}, content_type=MERGE)
        async for event in events:
            if event["object"]["metadata"].get("labels") == {"a": "b"}:
                break
        assert proxy.watches() == 1
    await eventually(lambda: _none_is_open(proxy), "end of the watch that nobody reads")
    assert [(seen.method, seen.watch, seen.status, seen.forwarded) for seen in proxy.asked(path="/deployments")] == [
        ("DELETE", False, 403, True),
        ("GET", False, 200, True),
        ("GET", True, 200, True),
    ]


async def _none_is_open(proxy: Proxy) -> bool:
    return not proxy.watches()


@pytest.mark.parametrize(
    ("fault", "reason", "reached"),
    [
        pytest.param({"status": 403}, "forbidden", False, id="403"),
        pytest.param({"status": 409}, "conflict", False, id="409"),
        pytest.param({"status": 429, "headers": {"Retry-After": "7"}}, "throttled", False, id="429"),
        pytest.param({"status": 500, "body": "<html>broken</html>"}, "unreachable", False, id="html error"),
        pytest.param({"status": 200, "body": "<html>log in</html>"}, "bad_body", False, id="html page"),
        pytest.param({"drop": "before"}, "unreachable", False, id="dropped before"),
        pytest.param({"drop": "after"}, "unreachable", True, id="dropped after"),
        pytest.param({"delay_s": 60.0}, "unreachable", False, id="slow"),
        pytest.param({"late_s": 60.0}, "unreachable", True, id="slow answer"),
    ],
)
async def test_faults(
    place: Place, proxy: Proxy, product: KubernetesApi, fault: dict[str, Any], reason: str, reached: bool
) -> None:
    await place.create(deployment(replicas=0))
    path = f"{place.deployments}/chat/scale"
    since = time.monotonic()
    with (
        proxy.rule(method="PATCH", path=r"/chat/scale$", times=1, **fault) as rule,
        pytest.raises(TargetError) as caught,
    ):
        await product.request("PATCH", path, body={"spec": {"replicas": 1}}, content_type=MERGE)
    assert (caught.value.reason, rule.hits) == (reason, 1)
    assert caught.value.retry_after_s == (7.0 if reason == "throttled" else None)
    assert [seen.forwarded for seen in proxy.asked("PATCH", since=since)] == [reached]
    assert (await place.read())["spec"]["replicas"] == int(reached)


@pytest.mark.parametrize("how", ["end", "cut", "expired"])
async def test_watches_end_as_told(place: Place, proxy: Proxy, product: KubernetesApi, how: str) -> None:
    version = (await product.request("GET", place.deployments))["metadata"]["resourceVersion"]
    async with product.watch(place.deployments, version, 30) as events:
        if how == "expired":
            bookmark = {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "7"}}}
            assert await proxy.tell(bookmark, place.namespace) == 1
            assert await anext(events) == bookmark
            assert await proxy.tell(EXPIRED, place.namespace) == 1
        else:
            stop = proxy.end if how == "end" else proxy.cut
            assert (stop("/no-such-path"), stop(place.namespace), stop(place.namespace)) == (0, 1, 0)
        if how == "end":
            assert [event async for event in events] == []
            return
        with pytest.raises(TargetError) as caught:
            await anext(events)
        assert caught.value.reason == ("expired" if how == "expired" else "unreachable")
