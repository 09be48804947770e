"""Is this scheduler the one that we know? What its limits are, and which of them may move.

vLLM's scheduler is not a public interface. Everything that the hook will touch is looked at before anything is moved:
it must be there, be an integer, equal what the configuration says, and take a write of its own value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .limits import PREFILL, SEQS, TOKENS, Envelope, is_integer

# Set on the function that wraps vLLM's own, see hook.py.
MARK = "__autoscaler_plugin__"


class PassiveError(Exception):
    """Why nothing is moved."""

    def __init__(self, code: str, message: str) -> None:
        """Keep the code for programs and the message for people."""
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Slot:
    """One attribute that the scheduler reads at every step."""

    owner: Any
    name: str

    def read(self) -> Any:
        """Return what is there now."""
        return getattr(self.owner, self.name)

    def write(self, value: int) -> None:
        """Put a value there."""
        setattr(self.owner, self.name, value)


@dataclass(frozen=True)
class Known:
    """What the canary found: where the limits live, and within what they may move.

    `clamp`: the admission cap is also the asserted size of the batch, as before 0.31.
    """

    slots: Mapping[str, Slot]
    envelope: Envelope
    clamp: bool
    num_speculative_tokens: int


def examine(scheduler: Any) -> Known:
    """Return what is to be known of a scheduler.

    Raises: PassiveError, when anything differs from what was tested.
    """
    if not getattr(getattr(type(scheduler), "schedule", None), MARK, False):
        raise PassiveError("other_scheduler", f"{type(scheduler).__name__} has a schedule() of its own")
    config = read(scheduler, "scheduler_config")
    for name in ("running", "waiting"):
        collection = read(scheduler, name)
        if not hasattr(collection, "__len__"):
            raise PassiveError("unexpected_value", f"{name} has no length")
    places = expected(scheduler, "max_num_running_reqs", integer(config, "max_num_seqs"))
    batched = integer(config, "max_num_batched_tokens")
    scheduled = getattr(config, "max_num_scheduled_tokens", None)
    budget = expected(scheduler, "max_num_scheduled_tokens", batched if scheduled is None else scheduled)
    clamp = not hasattr(scheduler, "max_num_active_reqs")
    admitted = places
    if not clamp:
        active = getattr(config, "max_num_active_seqs", None)
        admitted = expected(scheduler, "max_num_active_reqs", places if active is None else active)
    threshold = integer(config, "long_prefill_token_threshold")
    speculative = integer(scheduler, "num_spec_tokens")
    slots = {
        SEQS: Slot(scheduler, "max_num_running_reqs" if clamp else "max_num_active_reqs"),
        TOKENS: Slot(scheduler, "max_num_scheduled_tokens"),
        PREFILL: Slot(config, "long_prefill_token_threshold"),
    }
    for slot in slots.values():
        try_write(slot)
    floor = smallest_chunk(scheduler)
    envelope = Envelope(
        startup={SEQS: admitted, TOKENS: budget, PREFILL: threshold},
        # A threshold of 0 is none; a chunk is never smaller than a block of state-space models.
        floors={SEQS: 1, TOKENS: max(floor, 1 + speculative), PREFILL: 0},
        ceilings={SEQS: places, TOKENS: budget, PREFILL: max(threshold, min(budget, max_model_len(scheduler, budget)))},
        unsupported=unsupported(scheduler, config, floor),
        tokens_per_seq=1 + speculative,
    )
    return Known(slots, envelope, clamp, speculative)


def read(owner: Any, name: str) -> Any:
    """Return an attribute. Raises: PassiveError, without it."""
    try:
        return getattr(owner, name)
    except AttributeError as error:
        raise PassiveError("missing_attribute", f"{type(owner).__name__} has no {name}") from error


def integer(owner: Any, name: str) -> int:
    """Return an attribute that must be an integer, 0 or more. Raises: PassiveError."""
    value = read(owner, name)
    if not is_integer(value) or value < 0:
        raise PassiveError("unexpected_value", f"{name} is {value!r}, not an integer")
    number: int = value
    return number


def expected(owner: Any, name: str, value: int) -> int:
    """Return an attribute that must be an integer and have that value. Raises: PassiveError."""
    found = integer(owner, name)
    if found != value or found < 1:
        raise PassiveError("unexpected_value", f"{name} is {found}, where the configuration says {value}")
    return found


def try_write(slot: Slot) -> None:
    """Write what is there already, and read it back. Raises: PassiveError."""
    value = slot.read()
    try:
        slot.write(value)
    except (AttributeError, TypeError, ValueError) as error:  # a property, a frozen or validating dataclass
        raise PassiveError("not_writable", f"{slot.name} cannot be written: {error}") from error
    if slot.read() != value:
        raise PassiveError("not_writable", f"{slot.name} does not keep what is written")


def smallest_chunk(scheduler: Any) -> int:
    """Return the tokens that a chunk of a prompt must have [tokens]: a block with state-space layers, else 1."""
    if not getattr(scheduler, "need_mamba_block_aligned_split", False):
        return 1
    owners = (scheduler, "block_size"), (getattr(scheduler, "cache_config", None), "mamba_block_size")
    sizes = [getattr(owner, name, None) for owner, name in owners]
    return max(1, *(size for size in sizes if isinstance(size, int)))


def max_model_len(scheduler: Any, default: int) -> int:
    """Return the longest sequence [tokens]: vLLM refuses a threshold above it."""
    value = getattr(scheduler, "max_model_len", default)
    return value if isinstance(value, int) and value > 0 else default


def unsupported(scheduler: Any, config: Any, chunk: int) -> dict[str, str]:
    """Return the limits that would leave some prompt waiting for ever, each with the reason."""
    if not getattr(config, "enable_chunked_prefill", True):
        return dict.fromkeys((TOKENS, PREFILL), "chunked prefill is off, so a longer prompt would never be scheduled")
    if getattr(config, "disable_chunked_mm_input", False):
        return dict.fromkeys((TOKENS, PREFILL), "images are not split, so a larger one would never be scheduled")
    if chunk > 1:
        return {PREFILL: f"prompts are split at blocks of {chunk} tokens"}
    return {}
