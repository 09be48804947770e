"""The Prometheus HTTP API: instant queries, and every way in which one can fail told apart."""

import asyncio
import base64
import json
import math
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime
from pathlib import Path

import httpx

from autoscaler.core.policy import PrometheusServer
from autoscaler.core.types import GapReason
from autoscaler.errors import SourceError
from autoscaler.ports import Clock

MAX_BODY_BYTES = 8 * 2**20
MAX_DETAIL = 200
MAX_CONNECTIONS = 8
IDLE_CONNECTION_S = 30.0
RETRY_PAUSE_S = 0.2
MAX_BACKOFF_S = 30.0
MAX_RETRY_AFTER_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One element of an answer.

    Args:
        value: NaN and infinities as they came, NaN where it cannot be read; None for a native histogram.
        at: when the server evaluated it, epoch seconds; says nothing about the age of the data.
    """

    labels: Mapping[str, str]
    value: float | None
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one query gave.

    Args:
        warnings: the server says that data is missing or doubtful.
        infos: the server's advice on the query; the data is whole.
    """

    rows: tuple[Row, ...] = ()
    warnings: tuple[str, ...] = ()
    infos: tuple[str, ...] = ()


def parse_answer(body: bytes) -> Answer:
    """Return the rows of a successful answer's body.

    Raises: SourceError, `bad_body` when it is no answer at all, `query_error` when the query gives no instant numbers.
    """
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise SourceError("prometheus", GapReason.BAD_BODY, "not JSON: " + _text(body)) from error
    if not isinstance(document, dict):
        raise SourceError("prometheus", GapReason.BAD_BODY, "no API answer: " + _text(body))
    if document.get("status") == "error":
        raise SourceError("prometheus", GapReason.QUERY_ERROR, _api_error(document))
    data = document.get("data")
    kind, result = (data.get("resultType"), data.get("result")) if isinstance(data, dict) else (None, None)
    if kind in ("matrix", "string"):
        raise SourceError("prometheus", GapReason.QUERY_ERROR, f"the query gives a {kind}, not a number")
    if kind not in ("vector", "scalar") or not isinstance(result, list):
        raise SourceError("prometheus", GapReason.BAD_BODY, "no instant answer: " + _text(body))
    elements = [{"metric": {}, "value": result}] if kind == "scalar" else result
    return Answer(
        rows=tuple(_row(element) for element in elements),
        warnings=_texts(document.get("warnings")),
        infos=_texts(document.get("infos")),
    )


def _row(element: object) -> Row:
    if not isinstance(element, dict):
        return Row(labels={}, value=math.nan, at=math.nan)
    metric = element.get("metric")
    labels = {str(name): str(value) for name, value in metric.items()} if isinstance(metric, dict) else {}
    try:
        if "histogram" in element:
            return Row(labels=labels, value=None, at=float(element["histogram"][0]))
        at, value = element["value"]
        return Row(labels=labels, value=float(value), at=float(at))
    except (KeyError, IndexError, TypeError, ValueError):
        return Row(labels=labels, value=math.nan, at=math.nan)


def _texts(found: object) -> tuple[str, ...]:
    return tuple(dict.fromkeys(clip(str(text)) for text in found[:20])) if isinstance(found, list) else ()


def _text(body: bytes) -> str:
    return body[: 4 * MAX_DETAIL].decode("utf-8", "replace")


def _api_error(document: Mapping[str, object]) -> str:
    return f"{document.get('errorType', 'error')}: {document.get('error', '')}"


def clip(text: str) -> str:
    """Return `text` on one line of at most 200 characters."""
    text = " ".join(text.split())
    return text if len(text) <= MAX_DETAIL else text[: MAX_DETAIL - 1] + "…"


class _QueryError(SourceError):
    """A failed query, and what it says about asking again.

    Args:
        again: a second try in the same cycle may help.
        wait_s: how long the server wants to be left alone, when it says so.
    """

    def __init__(self, reason: GapReason, detail: str, *, again: bool = False, wait_s: float | None = None) -> None:
        super().__init__("prometheus", reason, detail)
        self.again = again
        self.wait_s = wait_s


class _Access:
    """How one server is reached: address, credentials and TLS. Files are read when needed, so that rotation works."""

    def __init__(self, server: PrometheusServer) -> None:
        self._server = server
        self._secrets: set[str] = set()

    def endpoint(self) -> httpx.URL:
        """Return the query endpoint, free of credentials. Raises _QueryError."""
        url = self._url()
        if url.scheme not in ("http", "https") or not url.host:
            raise _QueryError(GapReason.UNREACHABLE, "the server's url must be http://host or https://host")
        return url.copy_with(userinfo=b"", path=url.path.rstrip("/") + "/api/v1/query")

    def headers(self) -> dict[str, str]:
        """Return the request headers, with credentials as they are now. Raises _QueryError."""
        headers = {"accept": "application/json", "accept-encoding": "identity"}
        headers.update({name.lower(): value for name, value in self._server.headers.items()})
        secrets = [part for value in self._server.headers.values() for part in value.split() if len(part) >= 6]
        authorization, used = self._authorization()
        if authorization:
            headers["authorization"] = authorization
        self._secrets = {*secrets, *used}
        for name, value in headers.items():
            if not (value.isascii() and value.isprintable() and re.fullmatch(r"[!#$%&'*+.^_`|~0-9a-z-]+", name)):
                raise _QueryError(GapReason.UNAUTHORIZED, clip(f"header {name!r} cannot be sent: not plain ASCII"))
        return headers

    def redact(self, text: str) -> str:
        """Return `text` without any credential that was in use."""
        for secret in sorted(self._secrets, key=len, reverse=True):
            text = text.replace(secret, "[redacted]")
        return text

    def tls(self) -> ssl.SSLContext:
        """Return a context with the server's CA and our certificate as they are now. Raises _QueryError."""
        server = self._server
        try:
            context = ssl.create_default_context(cafile=server.ca_file) if server.ca_file else _public_tls()
            if server.cert_file:
                context.load_cert_chain(server.cert_file, server.key_file, password="")
        except OSError as error:
            raise _QueryError(GapReason.UNREACHABLE, clip(f"TLS files cannot be used: {error}")) from error
        if server.insecure_skip_verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context

    def tls_version(self) -> tuple[int, ...]:
        """Return when each TLS file was last changed; another answer asks for another context."""
        paths = (self._server.ca_file, self._server.cert_file, self._server.key_file)
        return tuple(_changed_ns(path) for path in paths if path)

    def _url(self) -> httpx.URL:
        try:
            return httpx.URL(self._server.url)
        except httpx.InvalidURL:
            raise _QueryError(GapReason.UNREACHABLE, "the server's url cannot be read") from None

    def _authorization(self) -> tuple[str, set[str]]:
        """Return the Authorization header, "" for none, and the secrets in it."""
        server, url = self._server, self._url()
        if server.bearer_token_file:
            token = _secret(server.bearer_token_file, "bearerTokenFile")
            return f"Bearer {token}", {token}
        if server.username and server.password_file:
            user, password = server.username, _secret(server.password_file, "passwordFile")
        elif url.userinfo:
            user, password = url.username, url.password
        else:
            return "", set()
        coded = base64.b64encode(f"{user}:{password}".encode()).decode()
        return f"Basic {coded}", {coded} | ({password} - {""})


def _public_tls() -> ssl.SSLContext:
    return httpx.create_ssl_context(trust_env=False)


def _changed_ns(path: str) -> int:
    try:
        return Path(path).stat().st_mtime_ns
    except OSError:
        return 0


def _secret(path: str, key: str) -> str:
    try:
        secret = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        what = error.strerror if isinstance(error, OSError) else "not text"
        raise _QueryError(GapReason.UNAUTHORIZED, clip(f"{key} {path} cannot be read: {what}")) from None
    if not secret:
        raise _QueryError(GapReason.UNAUTHORIZED, clip(f"{key} {path} is empty"))
    return secret


class PrometheusClient:
    """Asks one server that speaks the Prometheus HTTP API.

    Nothing here remembers an address: every new connection resolves the host's name, and an idle one is closed.

    Args:
        transport: stands in for the network.
    """

    def __init__(
        self, server: PrometheusServer, clock: Clock, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        self._timeout_s = server.timeout_s
        self._access = _Access(server)
        self._clock = clock
        self._transport = transport
        self._http: httpx.AsyncClient | None = None
        self._tls_version: tuple[int, ...] = ()
        self._quiet_until = -math.inf
        self._failed_cycles = 0
        self._failed_at = -math.inf

    async def query(self, expr: str, at: float) -> Answer:
        """Return what `expr` gives at `at`, the same epoch seconds for all queries of one cycle.

        Takes at most the server's `timeout_s`, a second try included. A server that asks for it, or fails cycle after
        cycle, is left alone for a while.

        Raises: SourceError, by reason: `query_error`, the query is at fault; `transient`, the server or the way there;
        `unreachable`, the settings; `timeout`; `unauthorized`; `http_status`; `body_too_large`; `bad_body`.
        """
        left_s = self._quiet_until - self._clock.now()
        if left_s > 0:
            raise SourceError(
                "prometheus", GapReason.TRANSIENT, f"not asked: the server is left alone for {left_s:.1f} s"
            )
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                answer = await self._ask(expr, at, limit)
        except TimeoutError as error:
            self._note_failure(at, None)
            raise SourceError("prometheus", GapReason.TIMEOUT, f"no answer within {self._timeout_s:g} s") from error
        except _QueryError as trouble:
            if trouble.reason in (GapReason.TRANSIENT, GapReason.TIMEOUT):
                self._note_failure(at, trouble.wait_s)
            raise
        self._failed_cycles = 0
        return answer

    async def close(self) -> None:
        """Close the connections."""
        if self._http is not None:
            await self._http.aclose()
            self._http = None

    async def _ask(self, expr: str, at: float, limit: asyncio.Timeout) -> Answer:
        try:
            return await self._ask_once(expr, at, limit)
        except _QueryError as trouble:
            if not trouble.again:
                raise
        await self._clock.sleep_until(self._clock.now() + RETRY_PAUSE_S)
        return await self._ask_once(expr, at, limit)

    async def _ask_once(self, expr: str, at: float, limit: asyncio.Timeout) -> Answer:
        url, headers = self._access.endpoint(), self._access.headers()
        left_s = (limit.when() or 0.0) - asyncio.get_running_loop().time()
        form = {"query": expr, "time": f"{at:.3f}", "timeout": f"{max(1, int(900 * left_s))}ms"}
        http = await self._connections()
        try:
            async with http.stream("POST", url, data=form, headers=headers) as response:
                body = await _bounded_body(response)
        except httpx.TimeoutException as error:
            raise _QueryError(GapReason.TIMEOUT, type(error).__name__) from error
        except httpx.TransportError as error:
            detail = self._access.redact(f"{type(error).__name__}: {error}")
            raise _QueryError(GapReason.TRANSIENT, clip(detail), again=True) from error
        if response.status_code != httpx.codes.OK:
            raise self._refusal(response, body)
        try:
            return parse_answer(body)
        except SourceError as error:
            raise _QueryError(GapReason(error.reason), clip(self._access.redact(error.detail))) from error

    async def _connections(self) -> httpx.AsyncClient:
        """Return the open client, made anew when a TLS file changed."""
        version = self._access.tls_version()
        if self._http is not None and version != self._tls_version:
            await self.close()
        if self._http is None:
            self._tls_version = version
            self._http = httpx.AsyncClient(
                verify=self._access.tls(),
                transport=self._transport,
                timeout=self._timeout_s,
                trust_env=False,
                limits=httpx.Limits(
                    max_connections=MAX_CONNECTIONS,
                    max_keepalive_connections=MAX_CONNECTIONS,
                    keepalive_expiry=IDLE_CONNECTION_S,
                ),
            )
        return self._http

    def _refusal(self, response: httpx.Response, body: bytes) -> _QueryError:
        """Return the failure that a status other than 200 means."""
        status = response.status_code
        detail = clip(f"HTTP {status}: {self._access.redact(_error_text(body))}")
        if status in (400, 422):
            return _QueryError(GapReason.QUERY_ERROR, detail)
        if status in (401, 403):
            return _QueryError(GapReason.UNAUTHORIZED, detail)
        if status not in (429, 502, 503, 504):
            return _QueryError(GapReason.HTTP_STATUS, detail)
        wait_s = _retry_after_s(response.headers.get("retry-after"), self._clock.now())
        return _QueryError(GapReason.TRANSIENT, detail, again=status != 429 and not wait_s, wait_s=wait_s)

    def _note_failure(self, at: float, wait_s: float | None) -> None:
        """Leave the server alone: as long as it asks, or 0, 5, 15, 30 s as whole cycles fail one after another."""
        if at != self._failed_at:
            self._failed_at = at
            self._failed_cycles += 1
        backoff_s = min(MAX_BACKOFF_S, 5.0 * (2.0 ** min(self._failed_cycles - 1, 8) - 1.0))
        self._quiet_until = max(self._quiet_until, self._clock.now() + (backoff_s if wait_s is None else wait_s))


async def _bounded_body(response: httpx.Response) -> bytes:
    """Return the body. Raises _QueryError for one that is too large, or packed though nobody asked for that."""
    if response.headers.get("content-encoding", "identity") != "identity":
        raise _QueryError(GapReason.BAD_BODY, "the body is compressed, which was not asked for")
    body = bytearray()
    async for chunk in response.aiter_bytes():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise _QueryError(GapReason.BODY_TOO_LARGE, f"the answer is larger than {MAX_BODY_BYTES} bytes")
    return bytes(body)


def _error_text(body: bytes) -> str:
    """Return the API's own words, or the body's beginning."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return _text(body)
    return _api_error(document) if isinstance(document, dict) and "error" in document else _text(body)


def _retry_after_s(header: str | None, now: float) -> float | None:
    """Return the seconds that a Retry-After header asks for, at most 300; None when it says nothing."""
    if header is None:
        return None
    try:
        seconds = float(header)
    except ValueError:
        try:
            date = parsedate_to_datetime(header)
        except ValueError:
            return None
        seconds = date.replace(tzinfo=date.tzinfo or UTC).timestamp() - now
    return min(max(seconds, 0.0), MAX_RETRY_AFTER_S) if math.isfinite(seconds) else None
