"""A fake of vLLM's scheduler and engine core: the attributes that the plugin reads, and the rules that kill an engine.

It admits, counts tokens and asserts as the real one does in three eras, read from the sources of 0.24, 0.29 and 0.32.
It lacks everything else: no KV cache, no model, no prefill in chunks, and one token a step for every sequence.
"""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal

from autoscaler.vllm_plugin.hook import wrap

# How a sequence is let in: until 0.24 `running == cap` stops it, then `>=`, and since 0.31 the cap has its own name.
Era = Literal["equal", "clamp", "cap"]


@dataclass
class FakeConfig:
    """What vLLM calls the scheduler's configuration, as far as the plugin reads it."""

    max_num_seqs: int = 16
    max_num_batched_tokens: int = 512
    long_prefill_token_threshold: int = 0
    enable_chunked_prefill: bool = True
    disable_chunked_mm_input: bool = False
    max_num_scheduled_tokens: int | None = None
    max_num_active_seqs: int | None = None


@dataclass
class FakeOutput:
    """What one step scheduled: tokens by sequence."""

    tokens: dict[int, int] = field(default_factory=dict)


class FakeScheduler:
    """Sequences are numbers; who runs and who waits are lists of them."""

    def __init__(self, era: Era = "cap", config: FakeConfig | None = None, *, spec: int = 0) -> None:
        """Begin empty, with the limits of the configuration."""
        self.era = era
        self.scheduler_config = config or FakeConfig()
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_index=0))
        self.max_num_running_reqs = self.scheduler_config.max_num_seqs
        self.max_num_scheduled_tokens = (
            self.scheduler_config.max_num_scheduled_tokens or self.scheduler_config.max_num_batched_tokens
        )
        if era == "cap":
            self.max_num_active_reqs = self.scheduler_config.max_num_active_seqs or self.max_num_running_reqs
        self.max_model_len = 2048
        self.num_spec_tokens = spec
        self.running: list[int] = []
        self.waiting: list[int] = []

    def schedule(self) -> FakeOutput:
        """Return one step. Raises: AssertionError, with which the real engine dies."""
        budget, output = self.max_num_scheduled_tokens, FakeOutput()
        for sequence in self.running:
            tokens = min(budget, 1 + self.num_spec_tokens)
            if tokens:
                output.tokens[sequence] = tokens
                budget -= tokens
        while self.waiting and budget > 0 and not self._full():
            sequence = self.waiting.pop(0)
            self.running.append(sequence)
            output.tokens[sequence] = 1
            budget -= 1
        assert sum(output.tokens.values()) <= self.max_num_scheduled_tokens
        assert len(self.running) <= self.max_num_running_reqs
        return output

    def get_request_counts(self) -> tuple[int, int]:
        """Return how many run and how many wait."""
        return len(self.running), len(self.waiting)

    def _full(self) -> bool:
        if self.era == "equal":
            return len(self.running) == self.max_num_running_reqs
        return len(self.running) >= getattr(self, "max_num_active_reqs", self.max_num_running_reqs)


@dataclass
class FakeCore:
    """What vLLM calls the engine core: a scheduler, and utility calls by name."""

    scheduler: Any

    def call(self, name: str, body: str) -> str:
        """Return the answer of a utility call."""
        answer: str = getattr(self, name)(body)
        return answer


def hooked(era: Era = "cap", config: FakeConfig | None = None, *, spec: int = 0) -> tuple[FakeScheduler, FakeCore]:
    """Return a scheduler and its core, of classes of their own that the plugin has wrapped."""
    scheduler, core = type("Scheduler", (FakeScheduler,), {}), type("Core", (FakeCore,), {})
    wrap(scheduler, core, vllm="0.0.fake", plugin="0.1.0")
    one: FakeScheduler = scheduler(era, config, spec=spec)
    return one, core(one)
