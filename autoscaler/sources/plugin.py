"""Reads the batching limits that the plugin inside each pod's vLLM says."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autoscaler.core.types import Limits, Pod, PodLimits, PodPhase, Reading, TargetStatus
from autoscaler.errors import SourceError
from autoscaler.ports import Clock
from autoscaler.sources.plugin_api import Answer, PluginApi, words_of

CONTRACT = 1
REFRESH_S = 10.0
"""A pod is asked so often: its limits change when we change them."""
SEQS, TOKENS, CHUNK = "max_num_seqs", "max_num_batched_tokens", "long_prefill_token_threshold"
LARGEST = 2**31
DEAD = frozenset({"engine_failed", "no_engine"})
"""Reasons to be passive that end with the engine; the others stay as long as the release does."""
_SHOWN = 200


class StateError(Exception):
    """A state is not as the contract has it."""


@dataclass(slots=True, kw_only=True)
class _Known:
    """What is known of one pod: what it said last, and when [s]; and when it was asked last."""

    limits: PodLimits
    said_at: float
    asked_at: float


class PluginSource:
    """Reads the ready pods' limits. A pod that says none has `refused` instead, with why.

    What a pod said counts for `stale_after_s` where it does not answer.
    """

    name = "plugin"

    def __init__(self, api: PluginApi, clock: Clock, *, stale_after_s: float) -> None:
        self._api = api
        self._clock = clock
        self._stale_after_s = stale_after_s + REFRESH_S
        self._known: dict[str, _Known] = {}

    async def read(self, target: TargetStatus, at: float) -> Reading:
        """Return the limits of all ready pods; nobody's failure is another's."""
        pods = [pod for pod in target.pods if pod.phase is PodPhase.RUNNING and pod.ready and pod.ip]
        self._known = {pod.uid: self._known[pod.uid] for pod in pods if pod.uid in self._known}
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._limits(pod, at)) for pod in pods]
        return Reading(limits=tuple(task.result() for task in tasks))

    async def close(self) -> None:
        """Close the connections."""
        await self._api.close()

    async def _limits(self, pod: Pod, at: float) -> PodLimits:
        """Return one pod's limits, asked anew when it is time."""
        known = self._known.get(pod.uid)
        if known is not None and not known.limits.refused and at - known.asked_at < REFRESH_S:
            return known.limits
        try:
            limits = limits_of(pod.uid, await self._api.request("GET", pod.ip))
        except SourceError as error:
            if known is not None and not known.limits.refused and at - known.said_at <= self._stale_after_s:
                known.asked_at = at
                return known.limits
            words = f"{error.reason}: {error.detail}" if error.detail else str(error.reason)
            limits = PodLimits(pod_uid=pod.uid, refused=words)
        self._known[pod.uid] = _Known(limits=limits, said_at=at, asked_at=at)
        return limits


def limits_of(uid: str, answer: Answer) -> PodLimits:
    """Return the limits that a pod's answer says, or why it says none that can be moved."""
    if answer.status != 200:
        return PodLimits(pod_uid=uid, refused=words_of(answer), lacking=answer.status == 404)
    try:
        return _read(uid, answer.document)
    except StateError as error:
        return PodLimits(pod_uid=uid, refused=f"its state cannot be read: {error}"[:_SHOWN])


def _read(uid: str, state: Mapping[str, Any]) -> PodLimits:
    """Return the limits of a state. Raises StateError."""
    contract = state.get("contract")
    if contract != CONTRACT:
        raise StateError(f"contract {contract!r:.20}, not {CONTRACT}")
    if state.get("status") != "active":
        reason = _mapping(state.get("reason") or {}, "reason")
        code = reason.get("code", "")
        words = f"passive: {code}: {reason.get('message', '')}"
        return PodLimits(pod_uid=uid, refused=words[:_SHOWN], lacking=code not in DEAD)
    engines = state.get("engines")
    if not isinstance(engines, list) or not engines:
        raise StateError("no engines")
    parts = [_engine(_mapping(engine, "engine"), state.get("native")) for engine in engines]
    ceilings, floors = [part.ceiling for part in parts], [part.floor for part in parts]
    return PodLimits(
        pod_uid=uid,
        limits=_fold(min, [part.limits for part in parts]),
        ceiling=_fold(min, ceilings),
        floor=_fold(max, floors),
        generation=_whole(state.get("generation"), "generation", 2**53),
        applied=_whole(state.get("applied_generation"), "applied_generation", 2**53),
    )


def _engine(engine: Mapping[str, Any], native: object) -> PodLimits:
    """Return one engine's part. While it has not yet taken up its target, its limits are those that it obeys."""
    ceilings, startup = _mapping(engine.get("ceilings"), "ceilings"), _mapping(engine.get("startup"), "startup")
    floors, targets = _mapping(engine.get("floors"), "floors"), _mapping(engine.get("targets"), "targets")
    taken = engine.get("applied_generation") == engine.get("generation")
    held = {**startup, **targets} if taken else _mapping(engine.get("effective"), "effective")
    capabilities = engine.get("capabilities")
    able = set(map(str, capabilities)) if isinstance(capabilities, list) else set()
    able -= set(map(str, native)) if isinstance(native, list) else set()
    return PodLimits(
        pod_uid="",
        limits=_limits(held, {SEQS, TOKENS, CHUNK}),
        ceiling=_limits(ceilings, able),
        floor=_limits(floors, able),
    )


def _limits(values: Mapping[str, Any], names: set[str]) -> Limits:
    """Return those of the values that are named."""
    read = {name: _whole(values.get(name), name, LARGEST) for name in (SEQS, TOKENS, CHUNK) if name in names}
    return Limits(**read)


def _fold(choose: Any, parts: Sequence[Limits]) -> Limits:
    """Return one limits of several engines'; None where one of them has none."""
    values: dict[str, int | None] = {}
    for name in (SEQS, TOKENS, CHUNK):
        said = [getattr(part, name) for part in parts]
        values[name] = None if None in said else choose(said)
    return Limits(**values)


def _whole(value: object, name: str, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < high:
        raise StateError(f"{name} is {value!r:.20}")
    return value


def _mapping(value: object, name: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise StateError(f"{name} is no object")
    return value
