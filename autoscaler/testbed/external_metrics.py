"""A fake of a metrics adapter: `external.metrics.k8s.io/v1beta1` behind the real API server, for a real HPA.

It answers with what is so at the moment it is asked: no scrape interval and no cache lie in between, so that no adapter
could serve an HPA sooner. It lacks: other API groups of metrics, lists of what there is, several series a metric, and
authorization: whoever the API server lets through is answered.
"""

import base64
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import httpx
from aiohttp import web

from autoscaler.testbed.api import Api, Json
from autoscaler.testbed.plane import Plane, free_ports

GROUP, VERSION = "external.metrics.k8s.io", "v1beta1"
NAME, NAMESPACE = "external-metrics", "kube-system"
ROOT = f"/apis/{GROUP}/{VERSION}"
API_SERVICE = f"{VERSION}.{GROUP}"
WAITING = "vllm:num_requests_waiting{"

Read = Callable[[str, str, str], Awaitable[float | None]]
"""Returns a metric's value by namespace, name and label selector; None where there is none."""


@asynccontextmanager
async def external_metrics(plane: Plane, read: Read) -> AsyncIterator[None]:
    """Serve the API while the block runs; the API server is there, and forwards to us, from its start to its end.

    An API that is registered and does not answer would keep namespaces from being deleted.
    """
    (port,) = free_ports(1)
    async with _served(plane, read, port), plane.api() as api:
        try:
            await api.apply(*_manifests(plane, port))
            await plane.until(lambda: _is_available(api), "external metrics")
            yield
        finally:
            await api.request("DELETE", f"/apis/apiregistration.k8s.io/v1/apiservices/{API_SERVICE}")
            await api.request("DELETE", f"/api/v1/namespaces/{NAMESPACE}/services/{NAME}")


@asynccontextmanager
async def _served(plane: Plane, read: Read, port: int) -> AsyncIterator[None]:
    async def discover(_: web.Request) -> web.Response:
        return web.json_response(
            {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": f"{GROUP}/{VERSION}", "resources": []}
        )

    async def answer(request: web.Request) -> web.Response:
        namespace, metric = request.match_info["namespace"], request.match_info["metric"]
        value = await read(namespace, metric, request.query.get("labelSelector", ""))
        return web.json_response(value_list(metric, value))

    app = web.Application()
    app.add_routes([web.get(ROOT, discover), web.get(ROOT + "/namespaces/{namespace}/{metric}", answer)])
    # Nobody but the API server, which shows the front proxy's certificate.
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(plane.folder / "ca.crt"))
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(*plane.certificate_for(f"{NAME}.{NAMESPACE}.svc"))
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port, ssl_context=context).start()
        yield
    finally:
        await runner.cleanup()


def value_list(metric: str, value: float | None) -> Json:
    """Return an ExternalMetricValueList with that one value, or empty."""
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    items: list[Json] = []
    if value is not None:
        quantity = f"{round(value * 1000)}m"
        items = [{"metricName": metric, "metricLabels": {}, "timestamp": now, "value": quantity}]
    return {"kind": "ExternalMetricValueList", "apiVersion": f"{GROUP}/{VERSION}", "metadata": {}, "items": items}


def _manifests(plane: Plane, port: int) -> tuple[Json, Json]:
    """Return what leads the API server to a port of this machine: a name, which needs no kube-proxy, and who serves."""
    authority = base64.b64encode((plane.folder / "ca.crt").read_bytes()).decode()
    return (
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": NAME, "namespace": NAMESPACE},
            "spec": {"type": "ExternalName", "externalName": "localhost"},
        },
        {
            "apiVersion": "apiregistration.k8s.io/v1",
            "kind": "APIService",
            "metadata": {"name": API_SERVICE},
            "spec": {
                "group": GROUP,
                "version": VERSION,
                "groupPriorityMinimum": 100,
                "versionPriority": 100,
                "service": {"name": NAME, "namespace": NAMESPACE, "port": port},
                "caBundle": authority,
            },
        },
    )


async def _is_available(api: Api) -> bool:
    service = await api.get(f"/apis/apiregistration.k8s.io/v1/apiservices/{API_SERVICE}")
    known = service.get("status", {}).get("conditions", ())
    return any(one["type"] == "Available" and one["status"] == "True" for one in known)


async def waiting_of(addresses: Iterable[str]) -> float:
    """Return how many requests wait in all engines together, as their pages say now."""
    total = 0.0
    async with httpx.AsyncClient() as client:
        for address in addresses:
            page = (await client.get(f"http://{address}/metrics")).raise_for_status().text
            lines = [line for line in page.splitlines() if line.startswith(WAITING)]
            total += sum(float(line.rpartition(" ")[2]) for line in lines)
    return total
