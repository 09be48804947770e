"""Scrapes the /metrics pages of a target's pods: gently, bounded in time and size, each failure told apart."""

import asyncio
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp

from autoscaler.core.policy import VllmSignals
from autoscaler.core.types import WHOLE_PAGE, Gap, GapReason, Pod, PodPhase, Reading, TargetStatus
from autoscaler.errors import SourceError
from autoscaler.ports import Clock
from autoscaler.sources.exposition import MAX_BODY, SeriesCache, parse_page
from autoscaler.sources.vllm_page import EngineBuilder, PodPage, build_engines, is_wanted

__all__ = ["EngineBuilder", "PodPage", "VllmSource", "build_engines", "is_wanted"]

# Asking for plain text keeps the names' colons; an encoding would hide the body's size.
_HEADERS = {"Accept": "text/plain;version=0.0.4", "Accept-Encoding": "identity"}
_KEEPALIVE_S = 75.0
_BODIES = 64
# Reads to sit out after so many refusals in a row.
_SKIPS = (0, 0, 1, 3)
_MAX_DETAIL = 200


class _RefusedError(SourceError):
    """Nothing listens at the pod's port."""


@dataclass(slots=True)
class _PodState:
    """What is remembered of one pod between reads.

    Args:
        page: the last page that could be read.
        busy: a scrape is under way.
        refusals: how often in a row the pod refused the connection.
        skip: reads to sit out before the next try.
    """

    page: PodPage | None = None
    busy: bool = False
    refusals: int = 0
    skip: int = 0


class VllmSource:
    """Reads every running pod's page, unready and terminating ones too: what counts is the core's business.

    A pod whose scrape fails keeps its last rows, with the time when they were read, until they are older than
    `stale_after_s`. A pod that is not ready and refuses connections is tried after 1, 2, then every 4 reads.

    Args:
        spread_s: scrapes are spread over this time, each pod at its own fixed share of it.
        session: used and left open; without one the source opens its own and closes it.
    """

    name = "vllm"

    def __init__(
        self,
        settings: VllmSignals,
        clock: Clock,
        *,
        spread_s: float = 0.0,
        session: aiohttp.ClientSession | None = None,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._spread_s = spread_s
        self._session = session
        self._owns_session = session is None
        self._cache = SeriesCache(is_wanted)
        self._builder = EngineBuilder(settings.model_name, self.name)
        self._pods: dict[str, _PodState] = {}
        # Bounds the memory of pages under way. Pods that have not answered yet hold no place, so they hold up nobody.
        self._bodies = asyncio.Semaphore(_BODIES)

    async def read(self, target: TargetStatus, at: float) -> Reading:
        """Return the rows of all engines that answered lately. Takes at most `spread_s` and `timeout_s` together."""
        pods = [pod for pod in target.pods if pod.phase is PodPhase.RUNNING and pod.ip]
        self._pods = {pod.uid: self._pods.get(pod.uid, _PodState()) for pod in pods}
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._refresh(pod, at)) for pod in pods]
        gaps = [gap for task in tasks if (gap := task.result()) is not None]
        engines, found = self._builder.build(self._pages(at))
        return Reading(engines=engines, gaps=(*gaps, *found))

    async def close(self) -> None:
        """Close the session, if it is the source's own."""
        if self._owns_session and self._session is not None:
            await self._session.close()
            self._session = None

    def families(self) -> Counter[tuple[str, str]]:
        """Count the pods by signal and the sample name that it was read from."""
        return self._builder.families([state.page for state in self._pods.values() if state.page is not None])

    def models(self) -> Counter[str]:
        """Count the pods by the models that their pages name, whatever the filter."""
        found: Counter[str] = Counter()
        for state in self._pods.values():
            if state.page is not None:
                names = {dict(key.labels).get("model_name", "") for key in state.page.page.keys}
                found.update(names - {""})
        return found

    def _pages(self, at: float) -> Sequence[PodPage]:
        """Return the pages that are still fresh enough; forget the others."""
        for state in self._pods.values():
            if state.page is not None and at - state.page.read_at > self._settings.stale_after_s:
                state.page = None
        return [state.page for state in self._pods.values() if state.page is not None]

    async def _refresh(self, pod: Pod, at: float) -> Gap | None:
        """Scrape one pod in its turn; return why not, if so."""
        state = self._pods[pod.uid]
        if state.busy:
            return _gap(pod, GapReason.TIMEOUT, "the last scrape is still under way")
        if state.skip > 0 and not pod.ready:
            state.skip -= 1
            return _gap(pod, GapReason.UNREACHABLE, "refused the connection; not tried this time")
        state.busy = True
        try:
            await self._clock.sleep_until(at + self._spread_s * zlib.crc32(pod.uid.encode()) / 2**32)
            state.page = await self._scrape(pod)
        except SourceError as error:
            state.refusals = state.refusals + 1 if isinstance(error, _RefusedError) else 0
            state.skip = _SKIPS[min(state.refusals, len(_SKIPS) - 1)]
            return _gap(pod, GapReason(error.reason), error.detail)
        else:
            state.refusals, state.skip = 0, 0
            return None
        finally:
            state.busy = False

    async def _scrape(self, pod: Pod) -> PodPage:
        """Return the pod's page. Raises SourceError."""
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                body = await self._get(self._url(pod))
        except TimeoutError as error:
            raise self._error(GapReason.TIMEOUT, f"no page within {self._settings.timeout_s:g}s") from error
        except aiohttp.ClientConnectorError as error:
            refused = isinstance(error.os_error, ConnectionRefusedError)
            raise self._error(GapReason.UNREACHABLE, str(error), refused=refused) from error
        except (aiohttp.ClientPayloadError, aiohttp.ClientResponseError) as error:
            raise self._error(GapReason.BAD_BODY, f"{type(error).__name__}: {error}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise self._error(GapReason.UNREACHABLE, f"{type(error).__name__}: {error}") from error
        page = parse_page(body, self._cache)
        if not page.keys and not page.bad and _is_foreign(body):
            raise self._error(GapReason.BAD_BODY, f"not a metrics page: {body[:80]!r}")
        return PodPage(pod=pod, read_at=round(self._clock.now(), 3), page=page)

    async def _get(self, url: str) -> bytes:
        """Return the body. Raises SourceError for a status other than 200 and for a body over the limit."""
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, limit_per_host=2, keepalive_timeout=_KEEPALIVE_S)
            self._session = aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())
        async with self._session.get(url, headers=_HEADERS, allow_redirects=False, auto_decompress=False) as response:
            if response.status in (401, 403):
                raise self._error(GapReason.UNAUTHORIZED, f"HTTP {response.status}")
            if response.status != 200:
                raise self._error(GapReason.HTTP_STATUS, f"HTTP {response.status}")
            async with self._bodies:
                body = bytearray()
                async for chunk in response.content.iter_any():
                    body += chunk
                    if len(body) > MAX_BODY:
                        raise self._error(GapReason.BODY_TOO_LARGE, f"more than {MAX_BODY} bytes")
                return bytes(body)

    def _url(self, pod: Pod) -> str:
        host = f"[{pod.ip}]" if ":" in pod.ip else pod.ip
        return f"{self._settings.scheme}://{host}:{self._settings.port}{self._settings.path}"

    def _error(self, reason: GapReason, detail: str, *, refused: bool = False) -> SourceError:
        return (_RefusedError if refused else SourceError)(self.name, reason, detail)


def _gap(pod: Pod, reason: GapReason, detail: str) -> Gap:
    return Gap(signal=WHOLE_PAGE, reason=reason, source=VllmSource.name, pod=pod.name, detail=detail[:_MAX_DETAIL])


def _is_foreign(body: bytes) -> bool:
    """Say whether a body without any series is no exposition at all: HTML, JSON, something packed."""
    start = body.lstrip()[:1]
    return start in (b"<", b"{", b"[") or b"\0" in body[:1024]
