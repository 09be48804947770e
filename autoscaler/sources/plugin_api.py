"""Asks the plugin inside a pod's vLLM: one request, bounded in time and size, told apart by its status.

The wire contract is docs/batching.md's contract 1.
"""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

from autoscaler.core.policy import PluginAccess
from autoscaler.core.types import GapReason
from autoscaler.errors import SourceError

PATH = "/v1/autoscaler/limits"
MAX_BODY = 1 << 18
"""A hundred engines' states; a route that says more is none of ours."""
_KEEPALIVE_S = 75.0
_SOURCE = "vllm"
_SHOWN = 200


class Answer(NamedTuple):
    """What a pod answered: the status, and the JSON object; empty where the body is none."""

    status: int
    document: Mapping[str, Any]


class PluginApi:
    """One connection pool to the pods of a target."""

    def __init__(
        self, access: PluginAccess, *, scheme: str, port: int, session: aiohttp.ClientSession | None = None
    ) -> None:
        """`scheme` and `port` are those of the pods' pages, for an access that names no port of its own."""
        self._access = access
        self._scheme = scheme
        self._port = access.port or port
        self._session = session
        self._owns_session = session is None

    async def request(self, method: str, ip: str, body: object = None) -> Answer:
        """Return what the pod at that address answers.

        Raises: SourceError, without an answer in time, with one that is too large, or without a token to ask with.
        """
        secrets = self._secrets()
        host = f"[{ip}]" if ":" in ip else ip
        url = f"{self._scheme}://{host}:{self._port}{PATH}"
        try:
            async with asyncio.timeout(self._access.timeout_s):
                return await self._send(method, url, secrets, body)
        except TimeoutError as error:
            raise _error(GapReason.TIMEOUT, f"no answer within {self._access.timeout_s:g}s") from error
        except aiohttp.ClientPayloadError as error:
            raise _error(GapReason.BAD_BODY, type(error).__name__) from error
        except (aiohttp.ClientError, OSError) as error:
            raise _error(GapReason.UNREACHABLE, type(error).__name__) from error

    async def close(self) -> None:
        """Close the session, if it is our own."""
        if self._owns_session and self._session is not None:
            await self._session.close()
            self._session = None

    async def _send(self, method: str, url: str, secrets: Mapping[str, str], body: object) -> Answer:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, limit_per_host=2, keepalive_timeout=_KEEPALIVE_S)
            self._session = aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())
        content = None if body is None else json.dumps(body).encode()
        headers = {**secrets, "Content-Type": "application/json"}
        async with self._session.request(method, url, headers=headers, data=content, allow_redirects=False) as response:
            text = bytearray()
            async for chunk in response.content.iter_any():
                text += chunk
                if len(text) > MAX_BODY:
                    raise _error(GapReason.BODY_TOO_LARGE, f"more than {MAX_BODY} bytes")
            return Answer(response.status, _read_object(bytes(text), secrets))

    def _secrets(self) -> dict[str, str]:
        """Return the headers that let us in, read anew, so that rotated secrets are taken up. Raises SourceError."""
        headers = {}
        if self._access.token_file is not None:
            headers["X-Autoscaler-Token"] = _secret(self._access.token_file, "tokenFile")
        if self._access.api_key_file is not None:
            headers["Authorization"] = f"Bearer {_secret(self._access.api_key_file, 'apiKeyFile')}"
        return headers


def _read_object(text: bytes, secrets: Mapping[str, str]) -> Mapping[str, Any]:
    """Return the JSON object of a body, without secrets that it may send back; an empty one where it is none."""
    words = text.decode(errors="replace")
    for secret in secrets.values():
        words = words.replace(secret.removeprefix("Bearer "), "***")
    try:
        document = json.loads(words)
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _secret(path: str, key: str) -> str:
    """Return the content of a file. Raises SourceError, which never names the content."""
    try:
        secret = Path(path).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        what = error.strerror if isinstance(error, OSError) else "not text"
        raise _error(GapReason.UNAUTHORIZED, f"{key} {path} cannot be read: {what}") from error
    if not secret or not secret.isprintable():
        raise _error(GapReason.UNAUTHORIZED, f"{key} {path} holds no token")
    return secret


def _error(reason: GapReason, detail: str) -> SourceError:
    return SourceError(_SOURCE, reason, detail[:_SHOWN])


def words_of(answer: Answer) -> str:
    """Return what an answer that is no state says, in words for people."""
    if answer.status == 404:
        return "the plugin is not there (HTTP 404)"
    error = answer.document.get("error")
    if not isinstance(error, dict):
        return f"HTTP {answer.status}"
    code, message = str(error.get("code", "")), str(error.get("message", ""))
    return f"HTTP {answer.status} {code}: {message}"[:_SHOWN]
