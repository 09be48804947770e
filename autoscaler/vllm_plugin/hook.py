"""What is wrapped inside vLLM: the scheduler's step, and one more utility call of the engine core.

Both are found by vLLM itself: every process loads the plugins of `vllm.general_plugins` before it chooses a scheduler,
and the engine core resolves utility calls by name. The call comes in the engine's own thread, between two steps.
"""

from __future__ import annotations

import functools
import json
import logging
from typing import Any

from .canary import MARK, PassiveError
from .control import Control
from .files import folder_of
from .limits import BadRequestError, RefusedError, StaleError

UTILITY = "autoscaler_limits"
ATTRIBUTE = "_autoscaler_control"
logger = logging.getLogger("vllm.autoscaler_plugin")


def install(plugin: str) -> None:
    """Wrap vLLM's scheduler and engine core, once a process. Where that cannot be, say so and leave vLLM as it is."""
    try:
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.engine.core import EngineCore
        from vllm.version import __version__ as vllm

        wrap(Scheduler, EngineCore, vllm=vllm, plugin=plugin)
    except Exception as error:  # noqa: BLE001 - vLLM runs this unguarded, and would not start
        logger.warning("autoscaler plugin: this vLLM has no scheduler that we know: %r", error)


def wrap(scheduler: Any, core: Any, *, vllm: str, plugin: str) -> None:
    """Wrap the two classes, unless they are wrapped already."""
    original = scheduler.schedule
    if getattr(original, MARK, False):
        return
    hook = Hook(vllm, plugin)

    @functools.wraps(original)
    def schedule(self: Any, *arguments: Any, **named: Any) -> Any:
        hook.before_step(self)
        return original(self, *arguments, **named)

    setattr(schedule, MARK, True)
    setattr(core, UTILITY, lambda self, body: answer(self.scheduler, body, vllm, plugin))
    scheduler.schedule = schedule


class Hook:
    """What runs before a step. Whatever goes wrong in it, the step takes place."""

    def __init__(self, vllm: str, plugin: str) -> None:
        """Remember whose versions to tell."""
        self._vllm = vllm
        self._plugin = plugin
        self._broken = False

    def before_step(self, scheduler: Any) -> None:
        """Let the scheduler's control set the limits."""
        if self._broken:
            return
        try:
            control = scheduler.__dict__.get(ATTRIBUTE) or control_of(scheduler, self._vllm, self._plugin)
        except Exception as error:  # noqa: BLE001 - the engine's life does not hang on this plugin
            self._broken = True
            logger.warning("autoscaler plugin: the limits are not moved: %r", error)
            return
        try:
            control.before_step()
        except Exception as error:  # noqa: BLE001 - for the same reason
            control.give_up(PassiveError("hook_failed", f"the hook failed: {error!r}"))


def control_of(scheduler: Any, vllm: str, plugin: str) -> Control:
    """Return the scheduler's control, which is made at its first step or the first call, whichever is earlier."""
    control: Control | None = scheduler.__dict__.get(ATTRIBUTE)
    if control is None:
        engine = engine_index(scheduler)
        control = Control(scheduler, folder_of(engine), engine=engine, vllm=vllm, plugin=plugin)
        setattr(scheduler, ATTRIBUTE, control)
    return control


def engine_index(scheduler: Any) -> int:
    """Return the data-parallel rank of the scheduler's engine, as vLLM's metrics label it; 0 where there is one."""
    config = getattr(getattr(scheduler, "vllm_config", None), "parallel_config", None)
    for name in ("data_parallel_index", "data_parallel_rank"):
        index = getattr(config, name, None)
        if isinstance(index, int):
            return index
    return 0


def answer(scheduler: Any, body: str, vllm: str, plugin: str) -> str:
    """Return the answer to one call, as JSON: `{"state": ...}`, or `{"error": ...}` with its HTTP status.

    An empty body asks for the state only. Errors are values here: vLLM would log an exception with its traceback.
    """
    try:
        control = control_of(scheduler, vllm, plugin)
        return json.dumps({"state": control.put(body) if body else control.get()})
    except BadRequestError as error:
        return failure(400, "bad_request", str(error))
    except StaleError as error:
        return failure(409, "stale_generation", str(error), generation=error.generation)
    except RefusedError as error:
        return failure(422, "refused", str(error), problems=[problem.document() for problem in error.problems])
    except PassiveError as error:
        return failure(503, "passive", f"{error.code}: {error}")


def failure(status: int, code: str, message: str, **more: Any) -> str:
    """Return an error as JSON."""
    return json.dumps({"error": {"status": status, "code": code, "message": message, **more}})
