"""A fake network between a client and the API server: a TLS proxy that injects what a healthy server never does.

What it lets through is the real server's word, watches as streams, with the client's own credentials. It presents the
server's certificate, speaks HTTP/1.1 only, and forwards no upgrades (exec, attach, port-forward). A request that it
delays is lost when its client gives up first. What it answers by itself is in no audit log.
"""

import asyncio
import json
import re
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import aiohttp
import yaml
from aiohttp import web

from autoscaler.testbed.api import LONGEST_LINE, Json
from autoscaler.testbed.plane import Plane

LARGEST_BODY = 2**24
# Of the connection, not of the request; the body's length and coding are ours to say.
HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "upgrade", "te", "trailer", "host", "content-length"}
REASONS = {401: "Unauthorized", 403: "Forbidden", 404: "NotFound", 409: "Conflict", 410: "Expired"} | {
    429: "TooManyRequests",
    500: "InternalError",
    503: "ServiceUnavailable",
}
Drop = Literal["", "before", "after"]
Body = Json | str | Callable[[int], Json] | None


@dataclass(slots=True, kw_only=True)
class Seen:
    """One request that arrived.

    Attributes:
        at: [s], monotonic.
        path: without its query.
        status: of the answer; 0 while there is none, and where the connection was dropped.
        forwarded: whether the API server was asked.
    """

    at: float
    method: str
    path: str
    query: Mapping[str, str]
    agent: str
    status: int = 0
    forwarded: bool = False

    @property
    def watch(self) -> bool:
        """Whether it opens a watch."""
        return self.query.get("watch") == "true"

    def fits(self, method: str, path: str, watch: bool | None) -> bool:
        """Return whether both patterns fit: the method's as a whole, the path's anywhere in it."""
        fits = re.fullmatch(method, self.method) and re.search(path, self.path)
        return bool(fits) and watch in (None, self.watch)


@dataclass(slots=True, kw_only=True)
class Rule:
    """What becomes of some requests; see `Proxy.rule`.

    Attributes:
        hits: how many it was applied to so far.
    """

    method: str
    path: str
    watch: bool | None
    times: int | None
    status: int
    body: Body
    headers: Mapping[str, str]
    delay_s: float
    late_s: float
    drop: Drop
    hits: int = 0

    def takes(self, seen: Seen) -> bool:
        """Return whether it applies to a request."""
        return (self.times is None or self.hits < self.times) and seen.fits(self.method, self.path, self.watch)

    def answer(self) -> web.Response:
        """Return its own answer: the body, or a Status as the API server writes it."""
        if isinstance(self.body, str):
            return web.Response(status=self.status, text=self.body, content_type="text/html", headers=self.headers)
        body = self.body(self.hits) if callable(self.body) else self.body or status_of(self.status)
        return web.json_response(body, status=self.status, headers=self.headers)


@dataclass(slots=True)
class _Stream:
    """A watch that is open: what the client gets, what the server sends, and how a test wants it to end."""

    seen: Seen
    response: web.StreamResponse
    upstream: aiohttp.ClientResponse
    wish: Literal["", "end", "cut"] = ""


@dataclass(slots=True)
class Proxy:
    """One that runs.

    Attributes:
        url: where it listens.
        seen: every request that arrived, oldest first.
    """

    plane: Plane
    session: aiohttp.ClientSession
    url: str = ""
    seen: list[Seen] = field(default_factory=list)
    _rules: list[Rule] = field(default_factory=list)
    _streams: list[_Stream] = field(default_factory=list)

    def kubeconfig_for(self, token: str, path: Path) -> Path:
        """Write a kubeconfig for the bearer of a token, whose server is this proxy."""
        content = yaml.safe_load(self.plane.kubeconfig_for(token, path).read_text())
        content["clusters"][0]["cluster"]["server"] = self.url
        path.write_text(yaml.safe_dump(content))
        return path

    @contextmanager
    def rule(
        self,
        *,
        method: str = ".*",
        path: str = "",
        watch: bool | None = None,
        times: int | None = None,
        status: int = 0,
        body: Body = None,
        headers: Mapping[str, str] | None = None,
        delay_s: float = 0.0,
        late_s: float = 0.0,
        drop: Drop = "",
    ) -> Iterator[Rule]:
        """Apply to the requests that fit while the block runs, before older rules do; yields the rule.

        Args:
            method: pattern of the whole method.
            path: pattern of any part of the path, the query left out.
            watch: whether the request opens a watch; None for both.
            times: how often at most.
            status: of an answer that is the proxy's own; 0 forwards the request.
            body: of that answer: an object, also by the number of the hit, or an HTML page; None is a Status as the API
                server writes it.
            delay_s: before anything else happens.
            late_s: after the API server has answered, and before the client hears of it.
            drop: drops the connection `before` the API server is asked, or `after` it has answered.
        """
        rule = Rule(
            method=method,
            path=path,
            watch=watch,
            times=times,
            status=status,
            body=body,
            headers=headers or {},
            delay_s=delay_s,
            late_s=late_s,
            drop=drop,
        )
        self._rules.insert(0, rule)
        try:
            yield rule
        finally:
            self._rules.remove(rule)

    def asked(self, method: str = ".*", path: str = "", watch: bool | None = None, since: float = 0.0) -> list[Seen]:
        """Return the requests that fit, as for a rule, from that time on."""
        return [seen for seen in self.seen if seen.at >= since and seen.fits(method, path, watch)]

    def watches(self, path: str = "") -> int:
        """Return how many watches are open."""
        return len(self._open(path))

    async def tell(self, event: Json, path: str = "") -> int:
        """Write an event into the open watches, as if the server had sent it; return how many heard it."""
        streams = self._open(path)
        for stream in streams:
            await stream.response.write(json.dumps(event).encode() + b"\n")
        return len(streams)

    def end(self, path: str = "") -> int:
        """End the open watches in good order; return how many there were."""
        return self._stop(path, "end")

    def cut(self, path: str = "") -> int:
        """Cut the open watches; return how many there were."""
        return self._stop(path, "cut")

    def _open(self, path: str) -> list[_Stream]:
        return [stream for stream in self._streams if stream.seen.fits(".*", path, None) and not stream.wish]

    def _stop(self, path: str, wish: Literal["end", "cut"]) -> int:
        streams = self._open(path)
        for stream in streams:
            stream.wish = wish
            stream.upstream.close()
        return len(streams)

    # --- one request ------------------------------------------------------------------------------------------------

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer one request, or drop its connection."""
        seen = Seen(
            at=time.monotonic(),
            method=request.method,
            path=request.path,
            query=dict(request.query),
            agent=request.headers.get("User-Agent", ""),
        )
        self.seen.append(seen)
        rule = next((rule for rule in self._rules if rule.takes(seen)), None)
        response: web.StreamResponse | None
        if rule is None:
            response = await self._forward(request, seen)
        else:
            rule.hits += 1
            response = await self._by_rule(rule, request, seen)
        if response is None:
            return _dropped(request)
        return response

    async def _by_rule(self, rule: Rule, request: web.Request, seen: Seen) -> web.StreamResponse | None:
        await asyncio.sleep(rule.delay_s)
        if rule.drop == "before":
            return None
        if rule.status:
            seen.status = rule.status
            return rule.answer()
        response = await self._forward(request, seen)
        await asyncio.sleep(rule.late_s)
        return None if rule.drop == "after" else response

    async def _forward(self, request: web.Request, seen: Seen) -> web.StreamResponse | None:
        """Return what the API server answers; None where it cannot be reached."""
        headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP_BY_HOP}
        body = await request.read()
        seen.forwarded = True
        try:
            async with self.session.request(
                request.method, self.plane.url + request.path_qs, data=body, headers=headers
            ) as upstream:
                kept = {name: value for name, value in upstream.headers.items() if name.lower() not in HOP_BY_HOP}
                seen.status = upstream.status
                if seen.watch and upstream.status == 200:
                    return await self._pass_on(request, seen, upstream, kept)
                return web.Response(status=upstream.status, headers=kept, body=await upstream.read())
        except (aiohttp.ClientError, OSError):
            return None

    async def _pass_on(
        self, request: web.Request, seen: Seen, upstream: aiohttp.ClientResponse, headers: Mapping[str, str]
    ) -> web.StreamResponse | None:
        """Pass a watch on, line by line, until its end; None where it is cut."""
        stream = _Stream(seen, web.StreamResponse(headers=headers), upstream)
        await stream.response.prepare(request)
        self._streams.append(stream)
        try:
            while line := await upstream.content.readline():
                await stream.response.write(line)
        except (aiohttp.ClientError, OSError):
            return stream.response if stream.wish == "end" else None
        finally:
            self._streams.remove(stream)
        return None if stream.wish == "cut" else stream.response


def status_of(code: int, message: str = "injected") -> Json:
    """Return a Status as the API server writes one."""
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": REASONS.get(code, ""),
        "code": code,
    }


EXPIRED: Json = {"type": "ERROR", "object": status_of(410, "too old resource version: 1 (2)")}
"""How a watch says that its version is forgotten."""


def _dropped(request: web.Request) -> web.Response:
    """Drop the connection, and return what nobody hears any more."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response()


@asynccontextmanager
async def running_proxy(plane: Plane) -> AsyncIterator[Proxy]:
    """Run a proxy on a free port of 127.0.0.1 while the block runs."""
    ours = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ours.load_cert_chain(plane.folder / "server.crt", plane.folder / "server.key")
    theirs = ssl.create_default_context(cafile=str(plane.folder / "ca.crt"))
    async with aiohttp.ClientSession(
        # A connection a request: one that an API server's restart has ended would be a fault that nobody asked for.
        connector=aiohttp.TCPConnector(ssl=theirs, limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=5.0),
        auto_decompress=False,
        read_bufsize=LONGEST_LINE,
    ) as session:
        proxy = Proxy(plane, session)
        application = web.Application(client_max_size=LARGEST_BODY)
        application.router.add_route("*", "/{path:.*}", proxy.handle)
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.5, handler_cancellation=True)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=ours).start()
            proxy.url = f"https://127.0.0.1:{runner.addresses[0][1]}"
            yield proxy
        finally:
            proxy.cut()
            await runner.cleanup()
