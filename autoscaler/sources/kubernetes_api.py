"""The Kubernetes API as this program uses it: one client a process, bounded calls, one table of refusals."""

import asyncio
import json
import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import aiohttp
import yaml
from aiohttp.http import HttpProcessingError

from autoscaler import __version__
from autoscaler.errors import TargetError
from autoscaler.ports import Clock
from autoscaler.sources.kubernetes_slim import slim_client

if TYPE_CHECKING:
    from kubernetes_asyncio.client import Configuration

Json = Mapping[str, Any]

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
DEFAULT_KUBECONFIG = "~/.kube/config"

REASONS = {
    400: "invalid",
    401: "unauthorized",
    403: "forbidden",
    404: "target_not_found",
    409: "conflict",
    410: "expired",
    422: "invalid",
    429: "throttled",
}
RETRY_AFTER_S = 1.0
MAX_RETRY_AFTER_S = 300.0
BACKOFF_S = 5.0
MAX_BACKOFF_S = 60.0
LOGIN_TIMEOUT_S = 30.0
WATCH_GRACE_S = 5.0
"""How much longer than it was asked to a server may keep a watch open without a client calling it silent."""
DETAIL_LENGTH = 200


class KubernetesApi:
    """One API server, shared by all targets and actuators of the process, and closed once by whoever made it.

    A server that asks for patience is not called again, by anyone and with any verb, until its time is over. A refused
    login is tried once more with credentials read anew, and then after 5, 10, 20, 40 and from then on 60 seconds, or as
    soon as there is another token in the file.

    Args:
        configuration: host, certificates and, unless `token_file` is given, the credentials.
        token_file: bearer token, read before each request, since it is rotated on disk.
        renew: loads the credentials into the configuration anew; called when they are refused.
        timeout_s: of one request, from connecting to the last byte.
        elder: another client of the same server, whose pauses hold for this one as well, and not the other way round.
    """

    def __init__(
        self,
        configuration: "Configuration",
        clock: Clock,
        *,
        token_file: Path | None = None,
        renew: Callable[[], Awaitable[None]] | None = None,
        timeout_s: float = 3.0,
        elder: "KubernetesApi | None" = None,
    ) -> None:
        from kubernetes_asyncio.client import ApiClient

        configuration.connection_pool_maxsize = 0  # no limit: each watch holds a connection all the time
        self._client = ApiClient(configuration)
        self._client.user_agent = f"vllm-autoscaler/{__version__}"
        self._configuration = configuration
        self._writes: dict[str, int] = {}
        self._clock = clock
        self._token_file = token_file
        self._renew = renew
        self._timeout_s = timeout_s
        self._elder = elder
        self._refusals = 0
        self._paused_until = 0.0
        self._paused_for = ""

    @classmethod
    async def connect(
        cls,
        clock: Clock,
        *,
        kubeconfig: str = "",
        context: str = "",
        environ: Mapping[str, str] = os.environ,
        account: Path = SERVICE_ACCOUNT,
        timeout_s: float = 3.0,
        elder: "KubernetesApi | None" = None,
    ) -> Self:
        """Return the API that is asked for, without calling it.

        In this order: `kubeconfig` or `context`, the variable KUBECONFIG, the pod's service account, ~/.kube/config.
        Raises TargetError that says what is missing or wrong.
        """
        slim_client()
        from kubernetes_asyncio.client import Configuration

        configuration = Configuration()
        paths = kubeconfig or environ.get("KUBECONFIG", "")
        try:
            if not paths and not context and "KUBERNETES_SERVICE_HOST" in environ:
                _load_service_account(configuration, environ, account)
                return cls(configuration, clock, token_file=account / "token", timeout_s=timeout_s, elder=elder)
            paths = paths or DEFAULT_KUBECONFIG
            renew = partial(_load_kubeconfig, configuration, paths, context)
            configuration.host = ""
            await renew()
            if not configuration.host:
                raise TargetError("unreachable", _detail(f"kubeconfig {paths}: its cluster has no server"))
            return cls(configuration, clock, renew=renew, timeout_s=timeout_s, elder=elder)
        except OSError as error:
            raise TargetError("unreachable", _detail(f"certificates of the API server: {error}")) from error

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: object = None,
        content_type: str = "application/json",
    ) -> Json:
        """Return the object that the server answers with.

        Raises TargetError; its reason may also be `conflict` or `invalid` where the request writes. After `unreachable`
        and `bad_body` a write may have taken effect.
        """
        what = f"{method} {path}"
        try:
            async with self._answer(method, path, query or {}, self._timeout_s, body, content_type) as response:
                with _reachable(what, self._timeout_s):
                    raw = await response.read()
        finally:
            self._count_write(method, path)
        return _object(raw)

    @asynccontextmanager
    async def watch(self, path: str, version: str, seconds: int) -> AsyncIterator[AsyncGenerator[Json]]:
        """Yield what happens to the list at the path after a version, once the server has agreed to tell it.

        The events are objects with `type` and `object`, bookmarks included; they end when the server ends the stream,
        which is asked of it after so many seconds. Raises TargetError, while opening as `request` does, and while
        reading: `expired` when the version is too old, `unreachable` when the stream is cut or goes on in silence,
        `bad_body` for a line that is no event.
        """
        query = {"watch": "true", "allowWatchBookmarks": "true", "resourceVersion": version}
        query["timeoutSeconds"] = str(seconds)
        limit_s = seconds + WATCH_GRACE_S
        async with (
            self._answer("GET", path, query, limit_s) as response,
            aclosing(_events(response, f"watch of {path}", limit_s)) as events,
        ):
            yield events

    def writes(self, path: str) -> int:
        """Return a number that changes with every write to the object at the path, or to a subresource of it.

        Counted from the first call for that path, at the end of the write, whatever its answer.
        """
        return self._writes.setdefault(path, 0)

    async def close(self) -> None:
        """Release the connections; more than once is allowed."""
        await self._client.close()

    @asynccontextmanager
    async def _answer(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        limit_s: float,
        body: object = None,
        content_type: str = "application/json",
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yield a good answer, whose body is still to be read; it has `limit_s` in all. Raises TargetError."""
        for api in (self, self._elder):
            if api is not None:
                api._check_patience()
        response = await self._send(method, path, query, limit_s, body, content_type)
        if response.status == 401:
            response.release()
            await self._login()
            response = await self._send(method, path, query, limit_s, body, content_type)
        async with response:
            if response.status != 401:
                self._refusals = 0
            if not 200 <= response.status < 300:
                with _reachable(f"{method} {path}", self._timeout_s):
                    raw = await response.read()
                raise self._refusal(f"{method} {path}", response.status, response.headers.get("Retry-After"), raw)
            yield response

    async def _send(
        self, method: str, path: str, query: Mapping[str, str], limit_s: float, body: object, content_type: str
    ) -> aiohttp.ClientResponse:
        """Return the answer to one request as soon as its headers are there. Raises TargetError."""
        self._read_token()
        with _reachable(f"{method} {path}", self._timeout_s):
            async with asyncio.timeout(self._timeout_s):
                response: aiohttp.ClientResponse = await self._client.call_api(
                    path,
                    method,
                    query_params=list(query.items()),
                    header_params={"Accept": "application/json", "Content-Type": content_type},
                    body=body,
                    auth_settings=["BearerToken"],
                    _preload_content=False,
                    _request_timeout=aiohttp.ClientTimeout(total=limit_s),
                )
        return response

    def _count_write(self, method: str, path: str) -> None:
        if method != "GET":
            for known in self._writes:
                self._writes[known] += path == known or path.startswith(f"{known}/")

    def _read_token(self) -> None:
        """Take up the token file's content. Raises TargetError when there is no token in it."""
        if self._token_file is None:
            return
        try:
            token = self._token_file.read_text(encoding="ascii").strip()
        except (OSError, ValueError) as error:
            raise TargetError("unauthorized", _detail(f"token file: {error}")) from error
        if not token or not token.isprintable():
            raise TargetError("unauthorized", f"{self._token_file} holds no token")
        self._configuration.api_key["BearerToken"] = f"Bearer {token}"

    def _check_patience(self) -> None:
        """Raise TargetError while there is to be no request. What a refused token began, another one ends."""
        left_s = self._paused_until - self._clock.now()
        if left_s <= 0:
            return
        if self._paused_for == "unauthorized" and self._has_new_token():
            self._paused_until = 0.0
            return
        raise TargetError(self._paused_for, f"no request for another {left_s:.1f} s", retry_after_s=left_s)

    def _has_new_token(self) -> bool:
        """Return whether the token file holds another token than the one that was refused."""
        refused = self._configuration.api_key.get("BearerToken")
        try:
            self._read_token()
        except TargetError:
            return False
        return self._configuration.api_key.get("BearerToken") != refused

    async def _login(self) -> None:
        """Load the credentials anew. Raises TargetError when that fails, and waits before it is tried again."""
        if self._renew is None:
            return
        try:
            await self._renew()
        except TargetError as error:
            raise TargetError(error.reason, error.detail, retry_after_s=self._back_off(error.reason)) from error

    def _back_off(self, reason: str) -> float:
        """Pause after a refused login, each time for longer; return the seconds."""
        if self._clock.now() >= self._paused_until:  # targets that are refused at the same time count once
            self._refusals += 1
        return self._pause(reason, min(MAX_BACKOFF_S, BACKOFF_S * 2.0 ** min(self._refusals - 1, 4)))

    def _pause(self, reason: str, seconds: float) -> float:
        self._paused_until, self._paused_for = self._clock.now() + seconds, reason
        return seconds

    def _refusal(self, what: str, status: int, wish: str | None, raw: bytes) -> TargetError:
        """Return the error that the status means, and pause where the server or a refused login asks for it."""
        reason = REASONS.get(status, "unreachable" if status >= 500 else "bad_body")
        message, causes = _complaint(raw)
        if status == 422 and not causes:
            reason = "conflict"  # a failed `test` of a JSON patch; a value that is not allowed comes with its causes
        pause_s: float | None = None
        if status == 429 or wish is not None:
            pause_s = self._pause(reason, _retry_after(wish))
        elif status == 401:
            pause_s = self._back_off(reason)
        return TargetError(reason, _detail(f"{what}: {status} {message}".rstrip()), retry_after_s=pause_s)


def _load_service_account(configuration: "Configuration", environ: Mapping[str, str], account: Path) -> None:
    """Fill in what Kubernetes gives to each pod."""
    from kubernetes_asyncio.config import ConfigException
    from kubernetes_asyncio.config.incluster_config import InClusterConfigLoader

    token, certificate = str(account / "token"), str(account / "ca.crt")
    try:
        # Without its refresh of the token: once a minute, and not when the token is refused.
        InClusterConfigLoader(token, certificate, False, dict(environ)).load_and_set(configuration)
    except ConfigException as error:
        raise TargetError("unreachable", _detail(f"service account: {error}")) from error


async def _load_kubeconfig(configuration: "Configuration", paths: str, context: str) -> None:
    """Fill in a kubeconfig's context, its login command included; `paths` as in the variable KUBECONFIG."""
    from kubernetes_asyncio.config import ConfigException, load_kube_config

    _check_kubeconfig(paths)
    try:
        async with asyncio.timeout(LOGIN_TIMEOUT_S):
            # Not persisted: a renewed token is ours alone, and the file is the user's.
            await load_kube_config(paths, context or None, configuration, persist_config=False)
    except TimeoutError as error:
        detail = f"kubeconfig {paths}: its login command took over {LOGIN_TIMEOUT_S:g} s"
        raise TargetError("unauthorized", _detail(detail)) from error
    except AssertionError as error:  # how its reader says that a cluster is empty
        raise TargetError("unreachable", _detail(f"kubeconfig {paths}: its cluster has no server")) from error
    except (ConfigException, OSError, ValueError) as error:
        raise TargetError("unauthorized", _detail(f"kubeconfig {paths}: {error}")) from error
    token = configuration.api_key.get("BearerToken")
    if token is not None:
        configuration.api_key["BearerToken"] = token.strip()  # files end with a newline, headers must not


def _check_kubeconfig(paths: str) -> None:
    """Raise TargetError unless at least one file is there, and each that is there has a kubeconfig's shape."""
    files = [file for file in map(Path, paths.split(os.pathsep)) if file.expanduser().is_file()]
    if not files:
        raise TargetError("unreachable", _detail(f"no kubeconfig at {paths}: give one, or run inside a pod"))
    for file in files:
        try:
            content = yaml.safe_load(file.expanduser().read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise TargetError("unreachable", _detail(f"kubeconfig {file}: {type(error).__name__}")) from error
        if not _is_kubeconfig(content):
            raise TargetError("unreachable", _detail(f"{file} is not a kubeconfig"))


def _is_kubeconfig(content: object) -> bool:
    """Return whether it is a mapping whose three lists hold named mappings, which its reader takes for granted."""
    return isinstance(content, dict) and all(_is_named(content, kind) for kind in ("cluster", "context", "user"))


def _is_named(content: Json, kind: str) -> bool:
    entries = content.get(f"{kind}s") or []
    return isinstance(entries, list) and all(
        isinstance(entry, dict) and "name" in entry and isinstance(entry.get(kind) or {}, dict) for entry in entries
    )


@contextmanager
def _reachable(what: str, limit_s: float) -> Iterator[None]:
    """Raise TargetError for what goes wrong between the server and us while the block runs."""
    try:
        yield
    except TimeoutError as error:
        raise TargetError("unreachable", f"{what}: no answer within {limit_s:g} s") from error
    except (aiohttp.ClientError, OSError) as error:
        raise TargetError("unreachable", _detail(f"{what}: {error or type(error).__name__}")) from error


async def _events(response: aiohttp.ClientResponse, what: str, limit_s: float) -> AsyncGenerator[Json]:
    """Yield a watch's events until the server ends it. Raises TargetError for one that says an error, or for none."""
    while True:
        try:
            with _reachable(what, limit_s):
                line = await response.content.readline()
        except (ValueError, HttpProcessingError) as error:
            raise TargetError("bad_body", f"{what}: a line that is too long") from error
        if not line:
            return
        event = _object(line)
        if event.get("type") == "ERROR":
            raise _stream_error(event.get("object"))
        yield event


def _stream_error(status: object) -> TargetError:
    """Return the error that a stream ends with: an HTTP status that came too late to be one."""
    content = status if isinstance(status, dict) else {}
    code = content.get("code")
    reason = REASONS.get(code, "bad_body" if code < 500 else "unreachable") if isinstance(code, int) else "bad_body"
    return TargetError(reason, _detail(f"watch: {code} {content.get('message', '')}".rstrip()))


def _object(raw: bytes) -> Json:
    """Return the JSON object of a good answer. Raises TargetError for anything else, such as a proxy's page."""
    try:
        content = json.loads(raw)
    except ValueError as error:
        raise TargetError("bad_body", "the API server's answer is not JSON") from error
    if not isinstance(content, dict):
        raise TargetError("bad_body", "the API server's answer is not an object")
    return content


def _complaint(raw: bytes) -> tuple[str, bool]:
    """Return the message of a refused request, "" where it is not a Status, and whether it names causes."""
    try:
        status = json.loads(raw)
    except ValueError:
        return "", False
    if not isinstance(status, dict):
        return "", False
    details = status.get("details")
    return str(status.get("message", "")), isinstance(details, dict) and bool(details.get("causes"))


def _retry_after(wish: str | None) -> float:
    """Return the seconds to wait: the API server writes whole seconds; a second where a proxy writes anything else."""
    if wish is None or not wish.strip().isdecimal():
        return RETRY_AFTER_S
    return min(MAX_RETRY_AFTER_S, max(RETRY_AFTER_S, float(wish)))


def _detail(text: str) -> str:
    return text[:DETAIL_LENGTH]
