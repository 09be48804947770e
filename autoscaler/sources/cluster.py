"""What a namespace holds, kept up to date by watching it: one list and then a stream for each kind of object.

A view is only as good as the last word from the server. Each stream is therefore asked to end after 20 s and opened
again, and a kind of which nothing was heard for 30 s cannot be read any more, however quiet the namespace is.
"""

import asyncio
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NoReturn
from urllib.parse import quote

from autoscaler.core.victims import ANNOTATION
from autoscaler.errors import TargetError
from autoscaler.ports import Clock
from autoscaler.sources.kubernetes_api import DETAIL_LENGTH, KubernetesApi
from autoscaler.sources.kubernetes_objects import (
    Json,
    as_object,
    as_objects,
    items_of,
    metadata_of,
    name_of,
    only,
    replica_writers,
    template_writers,
    uid_of,
    written_fields,
)
from autoscaler.sources.rollout import REVISION, TEMPLATE_HASH

KINDS: Mapping[str, tuple[str, str]] = {
    "deployments": ("apps", "/apis/apps/v1"),
    "replicasets": ("apps", "/apis/apps/v1"),
    "pods": ("", "/api/v1"),
    "horizontalpodautoscalers": ("autoscaling", "/apis/autoscaling/v2"),
}
RIGHTS = frozenset((group, kind, verb) for kind, (group, _) in KINDS.items() for verb in ("list", "watch"))
"""What the requests of this file need: API group, resource, verb. The Role in deploy/ grants these and no more."""

PAGE = 500
"""Objects a request of a list: a namespace with thousands of pods is not one answer of tens of megabytes."""
LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
REFUSED = frozenset({"unauthorized", "forbidden", "target_not_found"})
"""Answers that say for certain that the view is no longer ours to have; all others may pass by themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How often a server is asked, and for how long it is believed [s].

    Args:
        watch_s: how long a stream is asked to last. That it ends as asked confirms the view: of kinds in which nothing
            happens a server says nothing before, and sends no bookmarks either.
        stale_s: how old the last confirmation may be: a healthy stream's never is older than `watch_s` and a second.
        lost_s: how long there may be no stream at all, and no new one to be had.
        relist_s: lists of one kind are at least this far apart.
        backoff_s, max_backoff_s: before the first and before the later retries, doubled with each, less up to a half.
        hidden_s: before a kind that must not be seen is asked for again.
    """

    watch_s: int = 20
    stale_s: float = 30.0
    lost_s: float = 10.0
    relist_s: float = 1.0
    backoff_s: float = 0.5
    max_backoff_s: float = 2.0
    hidden_s: float = 30.0


class Watched:
    """The objects of one kind in one namespace, as long as `run` runs.

    Attributes:
        items: by name, pruned.
        changes: moves with every change of `items`.
        trouble: why there is no stream now; None while there is one.
        attempted: set once a stream was opened, or could not be.
    """

    def __init__(
        self, api: KubernetesApi, clock: Clock, kind: str, namespace: str, pace: Pace, *, optional: bool = False
    ) -> None:
        self.kind = kind
        self.items: dict[str, Json] = {}
        self.changes = 0
        self.trouble: TargetError | None = None
        self.attempted = asyncio.Event()
        self._api = api
        self._clock = clock
        self._pace = pace
        self._optional = optional
        self._path = f"{KINDS[kind][1]}/namespaces/{quote(namespace, safe='')}/{kind}"
        self._prune = PRUNE[kind]
        self._confirmed_at = -math.inf
        self._lost_at = math.inf
        self._failures = 0

    @property
    def hidden(self) -> bool:
        """Whether it is a kind that may stay unseen, and cannot be seen: no right, or no such API."""
        return self._optional and self.trouble is not None and self.trouble.reason in ("forbidden", "target_not_found")

    def check(self) -> None:
        """Raise TargetError when the items cannot be relied upon."""
        now = self._clock.now()
        age_s = now - self._confirmed_at
        trouble = self.trouble or TargetError("unreachable", "silence")
        believed = age_s <= self._pace.stale_s and now - self._lost_at <= self._pace.lost_s
        if self.hidden or (believed and trouble.reason not in REFUSED):
            return
        reason = "unreachable" if trouble.reason == "expired" else trouble.reason
        age = "" if believed or age_s == math.inf else f"{self.kind}: no word for {age_s:.0f} s; "
        # Without the wish for patience: the client keeps it, and a read of the cache asks nobody.
        raise TargetError(reason, f"{age}{trouble.detail}"[:DETAIL_LENGTH])

    async def run(self) -> None:
        """List and watch, for ever."""
        while True:
            listed_at = self._clock.now()
            try:
                await self._follow(await self._list())
            except TargetError as error:
                pause_s = self._failed(error)
            await self._clock.sleep_until(max(listed_at + self._pace.relist_s, self._clock.now() + pause_s))

    async def refresh(self, name: str) -> None:
        """Read one object anew; what the stream still says of the time before is passed over. Raises TargetError."""
        try:
            answer = await self._api.request("GET", self._path, query={"fieldSelector": f"metadata.name={name}"})
        except TargetError as error:
            raise TargetError(error.reason, error.detail) from error  # the client keeps a wish for patience
        found = [item for item in items_of(answer) if name_of(item) == name]
        for item in found:
            self._put(item)
        if not found and self.items.pop(name, None) is not None:
            self.changes += 1

    async def _list(self) -> str:
        """Take the whole list over, and return its version. Raises TargetError."""
        found: list[Json] = []
        asked_at = self._clock.now()
        query = {"limit": str(PAGE)}
        while True:
            answer = await self._api.request("GET", self._path, query=query)
            found += map(self._prune, items_of(answer))
            header = as_object(answer.get("metadata"))
            version, rest = header.get("resourceVersion"), header.get("continue")
            if not isinstance(version, str) or not version:
                raise TargetError("bad_body", f"{self.kind}: a list without a version")
            if not rest:
                break
            query["continue"] = str(rest)
        known = self.items
        self.items = {name_of(item): _later(known.get(name_of(item)), item) for item in found}
        self.changes += 1
        self._confirmed_at = asked_at
        return version

    async def _follow(self, version: str) -> NoReturn:
        """Keep up with the changes since a version, by one stream after the other.

        Raises TargetError in the end: for a stream that is refused, cut or silent, `expired` for a version that the
        server has forgotten, and for one that ends long before its time with nothing said, which vouches for nothing.
        """
        while True:
            opened_at, heard = self._clock.now(), 0
            async with self._api.watch(self._path, version, self._pace.watch_s) as events:
                self.trouble, self._lost_at = None, math.inf
                self.attempted.set()
                async for event in events:
                    version, heard = self._apply(event), heard + 1
                    self._confirm()
            if not heard and self._clock.now() - opened_at < self._pace.watch_s / 2:
                raise TargetError("unreachable", f"{self.kind}: a watch that ended at once with nothing said")
            self._confirm()
            await self._clock.sleep_until(opened_at + self._pace.relist_s)

    def _apply(self, event: Json) -> str:
        """Take one event up, and return the version that it brings. Raises TargetError for what is none."""
        item = as_object(event.get("object"))
        version, name = metadata_of(item).get("resourceVersion"), name_of(item)
        if not isinstance(version, str) or not version:
            raise TargetError("bad_body", f"{self.kind}: an event without a version")
        match event.get("type"):
            case "BOOKMARK":
                pass
            case "ADDED" | "MODIFIED" if name:
                self._put(item)
            case "DELETED" if name:
                known = self.items.get(name)
                if known is not None and uid_of(known) == uid_of(item):
                    del self.items[name]
                    self.changes += 1
            case kind:
                raise TargetError("bad_body", f"{self.kind}: an event of type {kind!s:.20}")
        return version

    def _put(self, item: Json) -> None:
        name = name_of(item)
        self.items[name] = _later(self.items.get(name), self._prune(item))
        self.changes += 1

    def _confirm(self) -> None:
        self._confirmed_at = self._clock.now()
        self._failures = 0

    def _failed(self, error: TargetError) -> float:
        """Take note that there is no stream; return how long to wait before the next."""
        self.trouble, self._lost_at = error, min(self._lost_at, self._clock.now())
        self.attempted.set()
        if self.hidden:
            self.changes += bool(self.items)
            self.items = {}
            return self._pace.hidden_s
        longest_s = min(self._pace.max_backoff_s, self._pace.backoff_s * 2.0 ** min(self._failures, 10))
        self._failures += 1
        # A wish for patience is kept by the client, which also knows when it ends early.
        return longest_s * random.uniform(0.5, 1.0)


class ClusterCache:
    """One namespace: its Deployments, ReplicaSets, pods and HorizontalPodAutoscalers, each watched by its own task."""

    def __init__(self, api: KubernetesApi, clock: Clock, namespace: str, pace: Pace) -> None:
        self.deployments = Watched(api, clock, "deployments", namespace, pace)
        self.replica_sets = Watched(api, clock, "replicasets", namespace, pace)
        self.pods = Watched(api, clock, "pods", namespace, pace)
        self.hpas = Watched(api, clock, "horizontalpodautoscalers", namespace, pace, optional=True)
        self._all = (self.deployments, self.replica_sets, self.pods, self.hpas)
        self._tasks = [asyncio.create_task(one.run(), name=f"watch {namespace}/{one.kind}") for one in self._all]

    @property
    def changes(self) -> int:
        """A number that moves with every change of any object."""
        return sum(one.changes for one in self._all)

    async def ready(self) -> None:
        """Return once everything can be relied upon. Raises TargetError when it cannot, after one attempt at the most.

        A task that has died of a bug is raised as RuntimeError, each time.
        """
        for one, task in zip(self._all, self._tasks, strict=True):
            if not one.attempted.is_set():
                await _first(asyncio.ensure_future(one.attempted.wait()), task)
            if task.done():
                died_of = None if task.cancelled() else task.exception()
                raise RuntimeError(f"the {task.get_name()} has ended") from died_of
        for one in self._all:
            one.check()

    async def close(self) -> None:
        """End the tasks and their streams."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _first(waiting: asyncio.Task[Literal[True]], task: asyncio.Task[None]) -> None:
    """Return once one of both has ended; end the first."""
    try:
        await asyncio.wait([waiting, task], return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()


class ClusterCaches:
    """The caches of one API server, one a namespace, each there while somebody uses it."""

    def __init__(self, api: KubernetesApi, clock: Clock, pace: Pace | None = None) -> None:
        self.api = api
        self._clock = clock
        self._pace = pace or Pace()
        self._caches: dict[str, tuple[ClusterCache, int]] = {}

    def acquire(self, namespace: str) -> ClusterCache:
        """Return the namespace's cache, and start it for its first user; `release` it afterwards."""
        known = self._caches.get(namespace)
        cache, users = known or (ClusterCache(self.api, self._clock, namespace, self._pace), 0)
        self._caches[namespace] = cache, users + 1
        return cache

    async def release(self, namespace: str) -> None:
        """Give the cache back; the last user's return ends it."""
        cache, users = self._caches[namespace]
        if users > 1:
            self._caches[namespace] = cache, users - 1
            return
        del self._caches[namespace]
        await cache.close()


def _prune_deployment(item: Json) -> Json:
    """Return a Deployment without the copy of it in an annotation, and only those managers who write what we write."""
    metadata = dict(metadata_of(item))
    annotations = as_object(metadata.get("annotations"))
    metadata["annotations"] = {key: value for key, value in annotations.items() if key != LAST_APPLIED}
    replicas, words = replica_writers(item), template_writers(item)
    metadata["managedFields"] = [
        {
            **only(entry, MANAGER),
            "fieldsV1": written_fields(entry, replicas=entry in replicas, words=entry in words),
        }
        for entry in as_objects(metadata.get("managedFields"))
        if entry in replicas or entry in words
    ]
    return {**item, "metadata": metadata}


MANAGER = ("manager", "operation", "subresource", "time")
METADATA = ("name", "uid", "generation", "creationTimestamp", "deletionTimestamp", "ownerReferences")


def _prune_replica_set(item: Json) -> Json:
    metadata = metadata_of(item)
    return {
        "metadata": {
            **only(metadata, METADATA),
            "labels": only(metadata.get("labels"), (TEMPLATE_HASH,)),
            "annotations": only(metadata.get("annotations"), (REVISION,)),
        },
        "spec": only(item.get("spec"), ("replicas",)),
        "status": only(item.get("status"), ("replicas",)),
    }


def _prune_pod(item: Json) -> Json:
    metadata, spec = metadata_of(item), as_object(item.get("spec"))
    containers = [only(one, ("name", "command", "args")) for one in as_objects(spec.get("containers"))]
    status = ("phase", "podIP", "startTime", "conditions", "containerStatuses", "initContainerStatuses")
    return {
        "metadata": {
            **only(metadata, METADATA),
            "labels": only(metadata.get("labels"), (TEMPLATE_HASH,)),
            "annotations": only(metadata.get("annotations"), (ANNOTATION,)),
        },
        "spec": {**only(spec, ("nodeName",)), "containers": containers},
        "status": only(item.get("status"), status),
    }


def _prune_hpa(item: Json) -> Json:
    return {
        "metadata": only(item.get("metadata"), METADATA),
        "spec": only(item.get("spec"), ("scaleTargetRef",)),
    }


PRUNE: Mapping[str, Callable[[Json], Json]] = {
    "deployments": _prune_deployment,
    "replicasets": _prune_replica_set,
    "pods": _prune_pod,
    "horizontalpodautoscalers": _prune_hpa,
}
"""What is kept of an object: what a target's status is made of. Of ten kilobytes a pod, one or two."""


def _later(known: Json | None, item: Json) -> Json:
    """Return the later of two states of what has the same name.

    A generation never falls while the object lives. A state of another object, or of the same generation, is taken for
    later: they come in order, but for what `refresh` read in between.
    """
    if known is None or uid_of(known) != uid_of(item) or _generation(known) <= _generation(item):
        return item
    return known


def _generation(item: Json) -> int:
    value = metadata_of(item).get("generation")
    return value if isinstance(value, int) else 0
