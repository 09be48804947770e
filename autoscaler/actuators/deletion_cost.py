"""Writes pods' deletion costs right before a step down, so that Kubernetes takes the pods that were decided on."""

import asyncio
from collections.abc import Callable
from typing import Any, Literal
from urllib.parse import quote

from autoscaler.actuators.deployment import ScaleApi
from autoscaler.core.policy import TargetRef
from autoscaler.core.types import FIELD_MANAGER, Action, DeletionCost, Outcome, ScaleReplicas
from autoscaler.core.victims import ANNOTATION
from autoscaler.errors import ActuationError, TargetError
from autoscaler.ports import Actuator

POD = "/api/v1/namespaces/{namespace}/pods/{name}"
MERGE_PATCH = "application/merge-patch+json"

RIGHTS = frozenset({("", "pods", "patch")})
"""What the requests of this file need: API group, resource, verb. The component deploy/components/gentle grants these
and no more."""

AT_ONCE = 8
MARKS_S = 1.5
"""For all marks of one step together: a step that waits for long is a step on old news."""

WRITTEN, FAILED = "written", "failed"


class MarkingActuator:
    """Writes the costs that an action carries, then lets another actuator carry it out.

    Args:
        inner: what scales.
        on_failure: where not all costs could be written, `proceed` scales all the same, `hold` does not.
        told: is told what became of each cost, `written` or `failed`, and why.
        marks_s: after this time what is not written counts as failed.
    """

    def __init__(
        self,
        inner: Actuator,
        api: ScaleApi,
        ref: TargetRef,
        *,
        on_failure: Literal["proceed", "hold"],
        told: Callable[[str, str], None],
        marks_s: float = MARKS_S,
    ) -> None:
        self._inner = inner
        self._api = api
        self._namespace = quote(ref.namespace, safe="")
        self._on_failure = on_failure
        self._told = told
        self._marks_s = marks_s

    async def apply(self, action: Action) -> Outcome:
        """Return what became of the action.

        Raises ActuationError, with `hold` also for costs that could not be written: `conflict` where a pod is not the
        one that the decision saw.
        """
        if isinstance(action, ScaleReplicas) and action.costs:
            errors = await self._mark(action.costs)
            if errors and self._on_failure == "hold":
                first, error = errors[0]
                detail = f"{len(errors)} of {len(action.costs)} deletion costs not written; {first.pod}: {error}"
                reason = "conflict" if error.reason == "target_not_found" else error.reason
                raise ActuationError(reason, detail, error.retry_after_s)
        return await self._inner.apply(action)

    async def close(self) -> None:
        """Release what the other actuator holds; the API is shared."""
        await self._inner.close()

    async def _mark(self, costs: tuple[DeletionCost, ...]) -> list[tuple[DeletionCost, TargetError]]:
        """Write the costs, some at a time, and return those that could not be, with why."""
        free, deadline = asyncio.Semaphore(AT_ONCE), asyncio.get_running_loop().time() + self._marks_s
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._write(cost, free, deadline)) for cost in costs]
        errors = [(cost, error) for cost, task in zip(costs, tasks, strict=True) if (error := task.result())]
        for _ in range(len(costs) - len(errors)):
            self._told(WRITTEN, "")
        for cost, error in errors:
            self._told(FAILED, f"{cost.pod}: {error}")
        return errors

    async def _write(self, cost: DeletionCost, free: asyncio.Semaphore, deadline: float) -> TargetError | None:
        """Return why the cost could not be written; None when it was."""
        path = POD.format(namespace=self._namespace, name=quote(cost.pod, safe=""))
        try:
            async with asyncio.timeout_at(deadline), free:
                await self._api.request(
                    "PATCH",
                    path,
                    query={"fieldManager": FIELD_MANAGER},
                    body=cost_patch(cost),
                    content_type=MERGE_PATCH,
                )
        except TargetError as error:
            return error
        except TimeoutError:
            return TargetError("unreachable", f"no answer within {self._marks_s:g} s")
        return None


def cost_patch(cost: DeletionCost) -> dict[str, Any]:
    """Return the merge patch of a pod; the uid in it makes the server refuse it for a successor of the same name."""
    value = None if cost.cost is None else str(cost.cost)
    return {"metadata": {"uid": cost.uid, "annotations": {ANNOTATION: value}}}
