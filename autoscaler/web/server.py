"""The operator's HTTP endpoints: metrics, liveness and readiness. They read; nothing here decides."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest

from autoscaler.errors import AutoscalerError
from autoscaler.ports import Clock

MIN_AGE_LIMIT_S = 60.0
AGE_LIMIT_INTERVALS = 3.0
_SHUTDOWN_S = 2.0
_TEXT_FORMAT = "text/plain; version=0.0.4; charset=utf-8"
_REMEDY = "give HOST:PORT, [IPV6]:PORT, :PORT or PORT, with a port from 0 to 65535"
_INDEX = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>autoscaler</title></head>
<body><h1>autoscaler</h1><ul>
<li><a href="metrics">metrics</a>: Prometheus metrics</li>
<li><a href="healthz">healthz</a>: the age of every policy's last completed tick</li>
<li><a href="readyz">readyz</a>: whether the target of every policy was seen</li>
</ul></body></html>
"""


@dataclass(slots=True)
class _Pulse:
    """One policy's sign of life: since when it is watched, when a tick last completed, whether its target was seen."""

    limit_s: float
    watched_at: float
    completed_at: float | None = None
    seen: bool = False


class Health:
    """Knows when each policy's last tick completed.

    A tick that ended in a known error, such as a target that does not exist, is completed too: one broken target must
    not get the process killed. A tick that died of a bug is not.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._pulses: dict[str, _Pulse] = {}

    def watch(self, policy: str, interval_s: float) -> None:
        """Watch a policy that is in force from now on; a new version of a known one keeps its last tick."""
        limit_s = max(AGE_LIMIT_INTERVALS * interval_s, MIN_AGE_LIMIT_S)
        pulse = self._pulses.setdefault(policy, _Pulse(limit_s, self._clock.now()))
        pulse.limit_s = limit_s

    def forget(self, policy: str) -> None:
        """Watch the policy no longer."""
        self._pulses.pop(policy, None)

    def completed(self, policy: str, *, seen: bool = True) -> None:
        """Take note of a completed tick; of a policy that is not watched it means nothing.

        Args:
            seen: false where the API server has not yet said what there is of the target.
        """
        pulse = self._pulses.get(policy)
        if pulse is not None:
            pulse.completed_at = self._clock.now()
            pulse.seen = pulse.seen or seen

    def live(self) -> tuple[bool, dict[str, object]]:
        """Return whether no policy's last completed tick is too old, and the ages; before the first, since loading."""
        now = self._clock.now()
        policies: dict[str, object] = {}
        alive = True
        for policy, pulse in self._pulses.items():
            age_s = now - (pulse.watched_at if pulse.completed_at is None else pulse.completed_at)
            fresh = age_s <= pulse.limit_s
            alive = alive and fresh
            policies[policy] = {
                "age_s": round(age_s, 3),
                "limit_s": pulse.limit_s,
                "completed": pulse.completed_at is not None,
                "live": fresh,
            }
        return alive, {"status": "ok" if alive else "stalled", "policies": policies}

    def ready(self) -> tuple[bool, dict[str, object]]:
        """Return whether policies are loaded and each one's target was seen once, and which were not."""
        waiting = [policy for policy, pulse in self._pulses.items() if not pulse.seen]
        if not self._pulses:
            return False, {"status": "no policies", "waiting_for": []}
        return not waiting, {"status": "waiting" if waiting else "ok", "waiting_for": waiting}


def parse_listen(listen: str) -> tuple[str | None, int]:
    """Return host and port of `host:port`, `[v6]:port`, `:port` or `port`; the host is None for every interface.

    Raises: AutoscalerError, saying what would be right.
    """
    host, _, port = listen.rpartition(":")
    if not (port.isascii() and port.isdecimal() and int(port) <= 65535):
        raise AutoscalerError(f"listen address {listen!r}: {_REMEDY}")
    bracketed = host.startswith("[") and host.endswith("]")
    name = host[1:-1] if bracketed else host
    if bracketed != (":" in name):
        raise AutoscalerError(
            f"listen address {listen!r}: an IPv6 address, and only that, stands in brackets; {_REMEDY}"
        )
    if any(letter in name for letter in "[]/@ "):
        raise AutoscalerError(f"listen address {listen!r}: {_REMEDY}")
    return name or None, int(port)


@asynccontextmanager
async def serve(listen: str, registry: CollectorRegistry, health: Health) -> AsyncIterator[str]:
    """Serve `/metrics`, `/healthz`, `/readyz` and an index of them while the context is open; give the base URL.

    Args:
        listen: see `parse_listen`; port 0 takes a free one.
    Raises: AutoscalerError, when the address cannot be listened on.
    """
    host, port = parse_listen(listen)
    runner = web.AppRunner(_application(registry, health), access_log=None, shutdown_timeout=_SHUTDOWN_S)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port).start()
        except (OSError, UnicodeError) as error:
            raise AutoscalerError(f"listen address {listen!r}: {error}") from error
        yield _base_url(runner.addresses[0])
    finally:
        await runner.cleanup()


def _base_url(address: tuple[str | int, ...]) -> str:
    host, port = str(address[0]), address[1]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _application(registry: CollectorRegistry, health: Health) -> web.Application:
    """Return the application; pages are rendered anew for each request."""

    async def index(_request: web.Request) -> web.Response:
        return web.Response(text=_INDEX, content_type="text/html")

    async def metrics(_request: web.Request) -> web.Response:
        # In a thread: a slow page must not hold up the decisions, which run on this loop.
        page = await asyncio.to_thread(generate_latest, registry)
        return web.Response(body=page, headers={"Content-Type": _TEXT_FORMAT})

    async def healthz(_request: web.Request) -> web.Response:
        return _verdict(*health.live())

    async def readyz(_request: web.Request) -> web.Response:
        return _verdict(*health.ready())

    application = web.Application()
    application.router.add_get("/", index)
    application.router.add_get("/metrics", metrics)
    application.router.add_get("/healthz", healthz)
    application.router.add_get("/readyz", readyz)
    return application


def _verdict(good: bool, document: dict[str, object]) -> web.Response:
    """Return the document as JSON, with status 200 or 503."""
    return web.json_response(document, status=200 if good else 503, headers={"Cache-Control": "no-store"})
