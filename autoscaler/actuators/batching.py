"""Tells pods their batching limits, each with the next generation, and believes only what it is answered."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, NamedTuple, Protocol

from autoscaler.core.types import Action, Limits, Outcome, PodBatching, SetBatching
from autoscaler.errors import ActuationError, SourceError
from autoscaler.ports import Actuator

AT_ONCE = 32
"""Pods that are told at a time."""
_SHOWN = 200


class Answered(Protocol):
    """An answer of a pod."""

    @property
    def status(self) -> int:
        """The HTTP status."""
        ...

    @property
    def document(self) -> Mapping[str, Any]:
        """The JSON object; empty where there was none."""
        ...


class LimitsApi(Protocol):
    """What is needed of the plugin inside a pod: its answer, or SourceError."""

    async def request(self, method: str, ip: str, body: object = None) -> Answered:
        """Return what the pod at that address answers."""
        ...

    async def close(self) -> None:
        """Release connections."""
        ...


class Refusal(NamedTuple):
    """Why one pod did not take its limits: a reason of ActuationError, and words."""

    pod: str
    reason: str
    words: str


class BatchingActuator:
    """Sets batching limits, and passes every other action on.

    Args:
        inner: carries out what is not about batching.
        told: is told of each pod by name, and "" or why it did not take its limits.
    """

    def __init__(self, inner: Actuator, api: LimitsApi, told: Callable[[str, str], None]) -> None:
        self._inner = inner
        self._api = api
        self._told = told

    async def apply(self, action: Action) -> Outcome:
        """Return what became of the action: APPLIED where at least one pod took its limits.

        A pod that did not is told again by a later tick, some times, and then left alone. Raises ActuationError where
        none took them.
        """
        if not isinstance(action, SetBatching):
            return await self._inner.apply(action)
        free = asyncio.Semaphore(AT_ONCE)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._tell(pod, free)) for pod in action.pods]
        refusals = [refusal for task in tasks if (refusal := task.result()) is not None]
        for pod in action.pods:
            self._told(pod.pod, next((one.words for one in refusals if one.pod == pod.pod), ""))
        if action.pods and len(refusals) == len(action.pods):
            first = refusals[0]
            detail = f"none of {len(refusals)} pods took its batching limits; {first.pod}: {first.words}"
            raise ActuationError(first.reason, detail[:_SHOWN])
        return Outcome.APPLIED

    async def close(self) -> None:
        """Release what the other actuator holds, and the connections to the pods."""
        try:
            await self._inner.close()
        finally:
            await self._api.close()

    async def _tell(self, pod: PodBatching, free: asyncio.Semaphore) -> Refusal | None:
        """Tell one pod; return why it did not take it. A generation that another has used is passed once."""
        if not pod.ip:
            return Refusal(pod.pod, "unreachable", "it has no address")
        async with free:
            try:
                answer = await self._put(pod, pod.generation + 1)
                used = _used_generation(answer)
                if used is not None:
                    answer = await self._put(pod, used + 1)
            except SourceError as error:
                return Refusal(pod.pod, "unreachable", f"{error.reason}: {error.detail}")
        return _judged(pod, answer)

    async def _put(self, pod: PodBatching, generation: int) -> Answered:
        return await self._api.request("PUT", pod.ip, {"generation": generation, "limits": document(pod.limits)})


def document(limits: Limits) -> dict[str, int]:
    """Return the limits as the plugin takes them: one that is left out goes back to what the engine started with."""
    named = ((field.name, getattr(limits, field.name)) for field in fields(limits))
    return {name: value for name, value in named if value is not None}


def _used_generation(answer: Answered) -> int | None:
    """Return the generation in force where ours was too low; None otherwise."""
    error = answer.document.get("error")
    if answer.status != 409 or not isinstance(error, Mapping):
        return None
    used = error.get("generation")
    return used if isinstance(used, int) and not isinstance(used, bool) else None


def _judged(pod: PodBatching, answer: Answered) -> Refusal | None:
    """Return why the pod did not take its limits; None where it says that they are in force."""
    if answer.status == 200:
        generation, applied = answer.document.get("generation"), answer.document.get("applied_generation")
        if isinstance(generation, int) and generation > pod.generation and generation == applied:
            return None
        return Refusal(pod.pod, "bad_body", f"answered generation {generation!r:.20}, applied {applied!r:.20}")
    error = answer.document.get("error")
    message = error.get("message", "") if isinstance(error, Mapping) else ""
    words = f"HTTP {answer.status}" + (f": {message}" if message else "")
    # `forbidden` would hold every write of this target back for minutes, those of replicas too.
    reason = {401: "unauthorized", 403: "unauthorized", 404: "target_not_found", 409: "invalid", 422: "invalid"}
    return Refusal(pod.pod, reason.get(answer.status, "unreachable"), words[:_SHOWN])
