"""From a model and a card to an engine's start-up values, each with its reason."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from autoscaler.core.kv import (
    GIB,
    KvLayout,
    ModelShape,
    kv_element_bytes,
    kv_layout,
    kv_token_bytes,
    reserve_bytes,
    weight_bytes,
)

UTILIZATION = 0.92
"""vLLM's default; 0.9 in older releases."""
GUARD_BYTES, GUARD_SHARE = 1.0 * GIB, 0.02
"""Left outside of vLLM: below that the daemon's out-of-memory guard speaks (`core.score`)."""
KV_SHARE = 0.9
"""Of the blocks that requests at their full length may fill. Measured on a server with 160 blocks: 20 requests of 8
blocks (this share) ran with one preemption, 64 of them with 69."""
WORTH_DOUBLING = 1.5
"""Twice the cards must hold this many times more requests a card."""
BATCH_WORTH = 256
"""Requests beyond this in one engine hardly add tokens per second, so they are no reason for more cards."""
MAX_GPUS = 8
MIN_SLICE_REQUESTS = 8
"""Fewer at once are not worth an engine of their own."""
BIG_BYTES, HUGE_BYTES = 70.0 * GIB, 160.0 * GIB
"""vLLM's own classes of cards (`get_batch_defaults` of 0.32)."""
MIN_BUDGET = 256


class PlanProblemError(ValueError):
    """Nothing that was asked for can start; the message says what would have to change."""


class Slice(NamedTuple):
    """A MIG profile of a card: its name, its memory and how many fit on the card."""

    name: str
    memory_bytes: float
    per_card: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A GPU as CUDA sees it.

    Args:
        name: as one writes it on the command line. `title`: as its vendor does.
        memory_bytes: in all, as PyTorch reports it.
        slices: MIG profiles, the smallest first.
        small_batches: vLLM starts it with the batches of a smaller card (A100).
    """

    name: str
    title: str
    memory_bytes: float
    slices: tuple[Slice, ...] = ()
    small_batches: bool = False


class Pace(Protocol):
    """How long an iteration takes: `sim.profile.Profile` is one."""

    @property
    def name(self) -> str:
        """Name of the profile."""

    def iteration_s(self, prefill: int, batch: int, context: int, quadratic: float) -> float:
        """Return the seconds of an iteration with so many prompt tokens, sequences and resident tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What is asked for; None leaves the choice to the plan.

    Args:
        gpus: tensor parallelism. `mig`: a profile of the card to plan for.
        prompt, output: tokens of a request, at the 90th percentile.
        contexts: tokens at which sequences are counted.
        itl_s: objective for the time between tokens; counts where `pace` is known.
    """

    shape: ModelShape
    card: Card
    gpus: int | None = None
    mig: str | None = None
    kv_dtype: str = "auto"
    block_tokens: int | None = None
    utilization: float | None = None
    max_model_len: int | None = None
    prompt: int = 1000
    output: int = 200
    contexts: tuple[int, ...] = (2048, 8192, 32768, 131072)
    itl_s: float | None = None
    pace: Pace | None = None


class Held(NamedTuple):
    """So many sequences at so many tokens of context."""

    context: int
    sequences: int


class Fit(NamedTuple):
    """A MIG profile that the model fits, with what one instance holds."""

    slice: Slice
    requests: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """An engine's start-up values and what they come to.

    Args:
        gpus: tensor parallelism. `mig`: the profile planned for, None for whole cards.
        weight_bytes, reserve_bytes, kv_bytes, device_bytes: of each GPU.
        kv_token_bytes: of one token over all GPUs of a replica.
        kv_tokens: the cache's size as `cache_config_info` will tell it.
        request_tokens: of a request at its end. `requests`: of those that fit the cache at once.
        reasons: why each value is what it is, by its name.
        fits: the smallest MIG profile that the model fits, where the card has any and one GPU is enough.
    """

    shape: ModelShape
    card: Card
    mig: Slice | None
    gpus: int
    kv_dtype: str
    gpu_memory_utilization: float
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    device_bytes: float
    weight_bytes: float
    reserve_bytes: float
    kv_bytes: float
    kv_token_bytes: float
    layout: KvLayout
    blocks: int
    kv_tokens: int
    request_tokens: int
    requests: int
    held: tuple[Held, ...]
    fits: Fit | None
    reasons: dict[str, str]


def plan(ask: Ask) -> Plan:
    """Return the plan. Raises PlanProblemError when the model does not fit."""
    device = _device(ask)
    gpus, why = _choose_gpus(ask, device)
    room, (seqs, why_seqs), (budget, why_budget) = _limits(ask, device, gpus)
    longest, why_longest = _max_model_len(ask, room)
    return Plan(
        shape=ask.shape,
        card=ask.card,
        mig=device.slice,
        gpus=gpus,
        kv_dtype=ask.kv_dtype,
        gpu_memory_utilization=device.utilization,
        max_model_len=longest,
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        device_bytes=device.memory_bytes,
        weight_bytes=room.weights,
        reserve_bytes=room.reserve,
        kv_bytes=room.kv_bytes,
        kv_token_bytes=kv_token_bytes(ask.shape, kv_element_bytes(ask.shape, ask.kv_dtype)),
        layout=room.layout,
        blocks=room.blocks,
        kv_tokens=room.layout.size_tokens(room.blocks, longest, 2 * budget),
        request_tokens=room.tokens,
        requests=room.requests,
        held=tuple(Held(one, room.layout.sequences(room.blocks, one)) for one in ask.contexts if one <= longest),
        fits=_fits(ask, gpus),
        reasons={
            "tensor_parallel_size": why,
            "gpu_memory_utilization": device.why,
            "max_model_len": why_longest,
            "max_num_seqs": why_seqs,
            "max_num_batched_tokens": why_budget,
        },
    )


# --- the card -------------------------------------------------------------------------------------------------------


class _Device(NamedTuple):
    """What one engine process has: a card, or a slice of it."""

    slice: Slice | None
    memory_bytes: float
    utilization: float
    why: str


def _device(ask: Ask) -> _Device:
    """Return the card or slice, and the share of it that vLLM may take."""
    chosen = None
    if ask.mig is not None:
        named = {one.name: one for one in ask.card.slices}
        if ask.mig not in named:
            known = ", ".join(named) or "none"
            raise PlanProblemError(f"{ask.card.title} has no MIG profile {ask.mig}; it has {known}")
        chosen = named[ask.mig]
    memory = ask.card.memory_bytes if chosen is None else chosen.memory_bytes
    if ask.utilization is not None:
        return _Device(chosen, memory, ask.utilization, "as asked for")
    guard = max(GUARD_BYTES, GUARD_SHARE * memory)
    safe = math.floor((1.0 - guard / memory) * 100.0) / 100.0
    if safe < UTILIZATION:
        return _Device(chosen, memory, safe, f"leaves {guard / GIB:.1f} GiB, below which the memory guard would speak")
    left = (1.0 - UTILIZATION) * memory / GIB
    return _Device(chosen, memory, UTILIZATION, f"vLLM's default; leaves {left:.1f} GiB outside, for what grows later")


def _defaults(card: Card, memory_bytes: float) -> tuple[int, int]:
    """Return vLLM's own max_num_seqs and max_num_batched_tokens of an API server on such a card."""
    if memory_bytes >= HUGE_BYTES:
        return 1024, 16384
    if memory_bytes >= BIG_BYTES and not card.small_batches:
        return 1024, 8192
    return 256, 2048


# --- what is left for the cache -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Room:
    """What one choice of cards and limits leaves for the KV cache, on each GPU.

    Args:
        tokens: of a request at its end.
    """

    gpus: int
    tokens: int
    budget: int
    weights: float
    reserve: float
    memory: float
    usable: float
    layout: KvLayout

    @classmethod
    def of(cls, ask: Ask, device: _Device, gpus: int, *, budget: int | None = None, seqs: int | None = None) -> "_Room":
        """Return the room with these limits; before they are chosen, with those that vLLM would start with.

        A first look counts the logits of no more sequences than are worth it: `max_num_seqs` will be about that.
        """
        seqs_default, budget_default = _defaults(ask.card, device.memory_bytes)
        chosen = budget or budget_default
        return cls(
            gpus=gpus,
            tokens=ask.prompt + ask.output,
            budget=chosen,
            weights=weight_bytes(ask.shape, gpus),
            reserve=reserve_bytes(ask.shape, gpus, chosen, seqs or min(seqs_default, BATCH_WORTH)),
            memory=device.memory_bytes,
            usable=device.utilization * device.memory_bytes,
            layout=kv_layout(ask.shape, gpus, kv_element_bytes(ask.shape, ask.kv_dtype), ask.block_tokens),
        )

    @property
    def kv_bytes(self) -> float:
        """What is left; below 0 when not even the weights fit."""
        return self.usable - self.weights - self.reserve

    @property
    def blocks(self) -> int:
        """Blocks of the cache."""
        return self.layout.blocks(self.kv_bytes)

    @property
    def requests(self) -> int:
        """Requests of the length asked for, at their end, that fit at once."""
        return self.layout.sequences(self.blocks, self.tokens)

    @property
    def longest(self) -> int:
        """Tokens of the longest request that fits alone."""
        return self.layout.longest(self.blocks, self.budget)


def _choose_gpus(ask: Ask, device: _Device) -> tuple[int, str]:
    """Return the tensor parallelism and why: doubled as long as that holds half as many requests more a card."""
    if device.slice is not None:
        if ask.gpus not in (None, 1):
            raise PlanProblemError("MIG instances cannot be joined: tensor parallelism must be 1 with --mig")
        _demand_room(ask, [_Room.of(ask, device, 1)])
        return 1, "MIG instances cannot be joined"
    if ask.gpus is not None:
        if ask.shape.heads % ask.gpus:
            raise PlanProblemError(f"{ask.gpus} cards do not divide the {ask.shape.heads} attention heads evenly")
        _demand_room(ask, [_Room.of(ask, device, ask.gpus)])
        return ask.gpus, "as asked for" if ask.pace is None else f"that of {ask.pace.name}"
    rooms = [_Room.of(ask, device, count) for count in _counts(ask.shape)]
    _demand_room(ask, rooms)
    usable = [room for room in rooms if _holds(ask, room)]
    chosen = usable[0]
    for wider in usable[1:]:
        gain = _per_card(wider) / max(_per_card(chosen), 1e-9)
        if gain < WORTH_DOUBLING or wider.gpus != 2 * chosen.gpus:
            break
        chosen = wider
    return chosen.gpus, _why_gpus(ask, rooms, chosen)


def _counts(shape: ModelShape) -> Sequence[int]:
    """Return the numbers of cards that divide the attention heads."""
    return [count for count in (1, 2, 4, 8) if count <= MAX_GPUS and shape.heads % count == 0]


def _holds(ask: Ask, room: _Room) -> bool:
    """Return whether an engine would start and serve: a request of the length asked for, and of the longest wished."""
    return room.requests >= 1 and room.longest >= (ask.max_model_len or room.tokens)


def _per_card(room: _Room) -> float:
    return min(room.requests, BATCH_WORTH) / room.gpus


def _demand_room(ask: Ask, rooms: Sequence[_Room]) -> None:
    """Raise PlanProblemError when none of the rooms holds what was asked for, with what is missing in the largest."""
    if any(_holds(ask, room) for room in rooms):
        return
    room = rooms[-1]
    where = ask.mig or f"{room.gpus} {ask.card.title}"
    need = f"weights {room.weights / GIB:.1f} GiB and {room.reserve / GIB:.1f} GiB of the engine's own on each"
    if room.kv_bytes <= 0.0:
        raise PlanProblemError(
            f"{ask.shape.name} does not fit {where}: {need}, of {room.usable / GIB:.1f} GiB usable; "
            "take more or larger cards, or fewer bits (--quantization)"
        )
    wished = f"--max-model-len {ask.max_model_len:,}" if ask.max_model_len else f"a request of {room.tokens:,} tokens"
    raise PlanProblemError(
        f"{ask.shape.name} leaves room for {room.longest:,} tokens on {where} ({need}), but {wished} was asked for; "
        "take more or larger cards, a shorter length, or --kv-cache-dtype fp8"
    )


def _why_gpus(ask: Ask, rooms: Sequence[_Room], chosen: _Room) -> str:
    """Return why this tensor parallelism, against half and twice of it."""
    by_count = {room.gpus: room for room in rooms}
    parts = [f"{chosen.requests:,} requests of {chosen.tokens:,} tokens fit"]
    if (less := by_count.get(chosen.gpus // 2)) is not None:
        if less.kv_bytes <= 0.0:
            parts.append(f"on {less.gpus} the weights alone are too large")
        elif not _holds(ask, less):
            parts.append(f"{less.gpus} would hold {less.longest:,} tokens")
        else:
            parts.append(f"on {less.gpus} only {less.requests:,}")
    if (more := by_count.get(2 * chosen.gpus)) is not None and _holds(ask, more):
        gain = _per_card(more) / max(_per_card(chosen), 1e-9)
        counted = f" (counted up to {BATCH_WORTH} an engine)" if more.requests > BATCH_WORTH else ""
        parts.append(f"{more.gpus} would hold {gain:.1f} times as many a card{counted}")
    return "; ".join(parts)


# --- the limits -----------------------------------------------------------------------------------------------------


def _limits(ask: Ask, device: _Device, gpus: int) -> tuple[_Room, tuple[int, str], tuple[int, str]]:
    """Return the room that is left with the limits, `max_num_seqs` and `max_num_batched_tokens`, each with its reason.

    More sequences need more logits, which leaves less cache for them: what a second look finds fits.
    """
    room = _Room.of(ask, device, gpus)
    seqs = _max_num_seqs(ask, room)
    for _ in range(2):
        budget = _budget(ask, room, seqs[0])
        room = _Room.of(ask, device, gpus, budget=budget[0], seqs=seqs[0])
        again = _max_num_seqs(ask, room)
        if again[0] >= seqs[0]:
            break
        seqs = again
    if ask.max_model_len is not None and room.longest < ask.max_model_len and seqs[0] > BATCH_WORTH:
        seqs = BATCH_WORTH, f"logits of more would take the room of a request of {ask.max_model_len:,} tokens"
    budget = _budget(ask, room, seqs[0])
    return _Room.of(ask, device, gpus, budget=budget[0], seqs=seqs[0]), seqs, budget


def _max_model_len(ask: Ask, room: _Room) -> tuple[int, str]:
    """Return the longest request that the server shall take, and why."""
    fits = room.longest
    if ask.max_model_len is not None:
        return ask.max_model_len, f"as asked for; the cache would hold one of {fits:,}"
    if fits >= ask.shape.max_model_len:
        return ask.shape.max_model_len, f"what the model was made for; the cache would hold one of {fits:,}"
    cut = fits // 1024 * 1024 if fits >= 2048 else fits
    return cut, f"the model's {ask.shape.max_model_len:,} would not fit the cache, which holds one of {fits:,}"


def _max_num_seqs(ask: Ask, room: _Room) -> tuple[int, str]:
    """Return the limit of sequences: what the cache sustains and the objective allows, at most what vLLM would take."""
    ceiling, _ = _defaults(ask.card, room.memory)
    blocks = room.layout.request_blocks(room.tokens)
    sustained = int((room.blocks - 1) * KV_SHARE) // blocks
    each = f"{blocks:,} blocks of a request of {room.tokens:,} tokens"
    choices = [
        (ceiling, f"vLLM's default on such a card; the cache sustains {sustained:,} of {room.tokens:,} tokens"),
        (sustained, f"{KV_SHARE:.0%} of {room.blocks - 1:,} blocks / {each}: more would be preempted"),
    ]
    if ask.pace is not None and ask.itl_s is not None:
        batch = _paced_batch(ask.pace, ask.itl_s, room, ceiling)
        choices.append((batch, f"the batch that decodes within {ask.itl_s * 1e3:g} ms a token, by {ask.pace.name}"))
    chosen, why = min(choices, key=lambda choice: choice[0])
    return max(1, chosen // 8 * 8 if chosen >= 16 else chosen), why


def _paced_batch(pace: Pace, itl_s: float, room: _Room, ceiling: int) -> int:
    """Return the largest batch, up to `ceiling`, whose decode iteration keeps the objective; at least 1."""

    def late(batch: int) -> bool:
        return pace.iteration_s(0, batch, batch * room.tokens, 0.0) > itl_s

    low, high = 1, ceiling
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (low, middle - 1) if late(middle) else (middle, high)
    return low


def _budget(ask: Ask, room: _Room, seqs: int) -> tuple[int, str]:
    """Return the token budget of an iteration, and why."""
    _, default = _defaults(ask.card, room.memory)
    if ask.pace is None or ask.itl_s is None:
        return default, "vLLM's default on such a card; give --profile and --slo itl=... to size it by time"
    for budget in _halved(default, max(MIN_BUDGET, 2 * seqs)):
        chunk = budget - seqs
        took = ask.pace.iteration_s(max(chunk, 0), seqs, seqs * room.tokens, max(chunk, 0) * ask.prompt / 2.0)
        if took <= ask.itl_s:
            what = f"an iteration full of prompt takes {took * 1e3:.0f} ms beside {seqs} decoding, by {ask.pace.name}"
            return budget, f"{what}; objective {ask.itl_s * 1e3:g} ms"
    return budget, f"the least that leaves half to prompts beside {seqs} decoding; takes {took * 1e3:.0f} ms"


def _halved(start: int, least: int) -> Iterator[int]:
    """Yield `start` and its halves, as long as they are at least `least`; always one."""
    yield start
    while start // 2 >= least:
        start //= 2
        yield start


def _fits(ask: Ask, gpus: int) -> Fit | None:
    """Return the smallest MIG profile, of several on a card, that serves a few requests at once; None without one."""
    if gpus != 1 or ask.mig is not None:
        return None
    for one in ask.card.slices:
        if one.per_card == 1:
            continue
        trial = replace(ask, mig=one.name)
        room = _Room.of(trial, _device(trial), 1)
        if room.requests >= MIN_SLICE_REQUESTS and room.longest >= (ask.max_model_len or room.tokens):
            return Fit(one, room.requests, room.longest)
    return None
