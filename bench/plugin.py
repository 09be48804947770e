"""The hook inside vLLM: microseconds that it adds to a step, with and without a target and a folder."""

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter
from types import SimpleNamespace
from typing import Any

from autoscaler.vllm_plugin.files import FOLDER_VARIABLE
from autoscaler.vllm_plugin.hook import UTILITY, wrap

STEPS, ROUNDS = 5000, 20
Row = tuple[str, str]


class FakeScheduler:
    """A fake of vLLM's: the attributes that the hook reads, 256 running sequences, and a step that does nothing."""

    def __init__(self, *, clamp: bool) -> None:
        """Begin with everybody running."""
        self.scheduler_config = SimpleNamespace(
            max_num_seqs=256, max_num_batched_tokens=8192, long_prefill_token_threshold=0, enable_chunked_prefill=True
        )
        self.max_num_running_reqs, self.max_num_scheduled_tokens = 256, 8192
        if not clamp:
            self.max_num_active_reqs = 256
        self.max_model_len, self.num_spec_tokens = 32768, 0
        self.running, self.waiting = list(range(256)), list(range(1000))

    def schedule(self) -> None:
        """Do nothing."""

    def get_request_counts(self) -> tuple[int, int]:
        """Return how many run and how many wait."""
        return len(self.running), len(self.waiting)


def measure() -> list[Row]:
    """Return label and value of each figure."""
    bare = _step_us(FakeScheduler(clamp=True).schedule)
    rows = [("a call of the step alone", f"{bare:.2f} us")]
    for label, clamp, limits, folder in (
        ("no target", False, {}, False),
        ("two limits, admission cap", False, {"max_num_seqs": 64, "max_num_batched_tokens": 512}, False),
        ("two limits, clamp", True, {"max_num_seqs": 64, "max_num_batched_tokens": 512}, False),
        ("two limits, clamp, with a folder", True, {"max_num_seqs": 64, "max_num_batched_tokens": 512}, True),
    ):
        with _folder(folder):
            hooked = _step_us(_hooked(clamp, limits).schedule)
        rows.append((f"{label}: added to a step", f"{hooked - bare:.2f} us"))
    return rows


def _hooked(clamp: bool, limits: Mapping[str, int]) -> Any:
    scheduler: Any = type("Scheduler", (FakeScheduler,), {})
    core: Any = type("Core", (SimpleNamespace,), {})
    wrap(scheduler, core, vllm="0", plugin="0")
    one = scheduler(clamp=clamp)
    body = json.dumps({"generation": 1, "limits": dict(limits)})
    answer = getattr(core(scheduler=one), UTILITY)(body)
    if "error" in json.loads(answer):
        raise RuntimeError(answer)
    return one


def _step_us(step: Callable[[], None]) -> float:
    """Return the least of the rounds' means: what is above it is this machine's other work [us]."""
    means = []
    for _ in range(ROUNDS):
        begin = perf_counter()
        for _ in range(STEPS):
            step()
        means.append((perf_counter() - begin) / STEPS)
    return 1e6 * min(means)


@contextmanager
def _folder(wanted: bool) -> Iterator[None]:
    """Name a folder to the plugin, or none."""
    with tempfile.TemporaryDirectory() as name:
        os.environ.pop(FOLDER_VARIABLE, None)
        if wanted:
            os.environ[FOLDER_VARIABLE] = name
        yield
        os.environ.pop(FOLDER_VARIABLE, None)
