"""One engine's control: where targets come in, where the state goes out, and when to stay passive."""

from __future__ import annotations

import logging
import time
from typing import Any

from .canary import PassiveError, examine
from .files import Folder
from .limiter import Limiter
from .limits import BadRequestError, RefusedError, StaleError, Target, read_target

CONTRACT = 1
POLL_S = 0.5
STATE_S = 2.0
UNKNOWN: dict[str, Any] = {
    "admission": None,
    "capabilities": [],
    "unsupported": {},
    "startup": None,
    "floors": None,
    "ceilings": None,
    "targets": {},
    "effective": None,
    "num_speculative_tokens": None,
}
logger = logging.getLogger("vllm.autoscaler_plugin")


class Control:
    """Lives beside one scheduler, and is only called in that scheduler's thread, between two steps.

    Passive, it moves nothing and says why. It becomes so when the canary finds a scheduler that it does not know, when
    somebody else moves a limit, and when it fails itself: the engine serves on, with its start-up values.
    """

    def __init__(self, scheduler: Any, folder: Folder | None, *, engine: int, vllm: str, plugin: str) -> None:
        """Examine the scheduler. The folder's target is taken before the first step."""
        self._scheduler = scheduler
        self._folder = folder
        self._about = {"contract": CONTRACT, "plugin": plugin, "vllm": vllm, "engine": engine}
        self._limiter: Limiter | None = None
        self._passive: PassiveError | None = None
        self._refused: dict[str, Any] | None = None
        self._steps = 0
        self._next_poll_s = self._next_state_s = 0.0
        try:
            self._limiter = Limiter(scheduler, examine(scheduler))
        except PassiveError as error:
            self.give_up(error)
        except Exception as error:  # noqa: BLE001 - a property of a scheduler that we do not know may raise anything
            self.give_up(PassiveError("hook_failed", f"the scheduler cannot be examined: {error!r}"))

    def before_step(self) -> None:
        """Set the limits for the step that follows; look at the file, and write the state, now and then."""
        self._steps += 1
        now_s = time.monotonic()
        if now_s >= self._next_poll_s:
            self._next_poll_s = now_s + POLL_S
            self._take_file()
        if self._passive is None and self._limiter is not None:
            try:
                self._limiter.obey()
            except PassiveError as error:
                self.give_up(error)
        if now_s >= self._next_state_s:
            self._show(now_s)

    def put(self, body: str) -> dict[str, Any]:
        """Put a target in force, keep it for the next start, and return the state.

        Raises: BadRequestError, StaleError, RefusedError; PassiveError, when nothing is moved here.
        """
        asked = read_target(body)
        self._take_file()
        self._take(asked)
        if self._folder is not None:
            self._folder.save_target(asked)
        self._show(time.monotonic())
        return self.state()

    def get(self) -> dict[str, Any]:
        """Return the state. A changed file is taken first: an idle engine makes no steps that would see it."""
        self._take_file()
        return self.state()

    def give_up(self, reason: PassiveError) -> None:
        """Move nothing from now on, for this reason."""
        self._passive = reason
        logger.warning("autoscaler plugin: the limits are not moved: %s", reason)
        for problem in self._limiter.release() if self._limiter is not None else []:
            logger.warning("autoscaler plugin: %s", problem)

    def state(self) -> dict[str, Any]:
        """Return what docs/batching.md calls an engine's state."""
        reason = self._passive
        limiter = self._limiter
        target = limiter.target if limiter is not None else Target()
        running, waiting = self._counts()
        state = {
            **self._about,
            "persistent": self._folder is not None and self._folder.writable,
            "status": "active" if reason is None else "passive",
            "reason": None if reason is None else {"code": reason.code, "message": str(reason)},
            **(limiter.document() if limiter is not None else UNKNOWN),
            "generation": target.generation,
            "applied_generation": target.generation if reason is None else 0,
            "running": running,
            "waiting": waiting,
            "steps": self._steps,
            "refused": self._refused,
        }
        if reason is not None:
            state |= {"capabilities": [], "targets": {}}
        return state

    def _take(self, asked: Target) -> None:
        if self._passive is not None:
            raise self._passive
        if self._limiter is not None:
            try:
                self._limiter.take(asked)
            except PassiveError as error:
                self.give_up(error)
                raise
            self._refused = None

    def _take_file(self) -> None:
        if self._folder is None or self._passive is not None:
            return
        try:
            asked = self._folder.changed_target()
            if asked is not None:
                self._take(asked)
                self._next_state_s = 0.0
        except RefusedError as error:
            self._refused = {"message": str(error), "problems": [problem.document() for problem in error.problems]}
        except (BadRequestError, StaleError, PassiveError) as error:
            self._refused = {"message": str(error), "problems": []}

    def _counts(self) -> tuple[int | None, int | None]:
        try:
            counts: tuple[int, int] = self._scheduler.get_request_counts()
        except (AttributeError, TypeError):  # a release without, or a scheduler that lacks what it counts
            return None, None
        return counts

    def _show(self, now_s: float) -> None:
        self._next_state_s = now_s + STATE_S
        if self._folder is not None:
            self._folder.save_state(self.state())
