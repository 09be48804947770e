"""One vLLM replica, iteration by iteration: the V1 scheduler on a model of step time. Exact, and fast enough for days.

Runs of pure decode iterations are jumped over in closed form, since nothing else can change inside one: the batch is
constant, the step time grows linearly with the context. All times are seconds since the start of the simulation:
epoch seconds would leave a double only a quarter of a microsecond.
"""

import math
from collections import deque
from collections.abc import Iterator
from heapq import heappop, heappush
from typing import NamedTuple

from autoscaler.sim.ledger import Fate, Ledger
from autoscaler.sim.profile import Profile
from autoscaler.sim.tally import Tallies


class Request(NamedTuple):
    """One request as a client sends it: when [s], and the tokens that it brings and will get.

    Of its prompt the share `cached_ratio` (0 to 1), in whole blocks, is in the prefix cache: not computed, but held in
    the KV cache like the rest, and found again after a preemption. Blocks are not shared between requests.
    """

    arrival: float
    prompt_tokens: int
    output_tokens: int
    cached_ratio: float = 0.0


class Limits(NamedTuple):
    """What the scheduler may take into one iteration; a threshold of 0 is none."""

    max_num_seqs: int
    max_num_batched_tokens: int
    long_prefill_token_threshold: int


class _Sequence:
    """One request inside the engine.

    Once it decodes, it holds `base + step` tokens in the KV cache, where `step` is the engine's count of iterations,
    and ends when `step` reaches `finish_step`, which is -1 before.
    """

    __slots__ = (
        "arrival",
        "base",
        "cached",
        "computed",
        "deadline",
        "finish_step",
        "first_token",
        "generated",
        "last_token",
        "output",
        "preemptions",
        "prompt",
        "scheduled",
        "tokens",
        "uncounted",
    )

    def __init__(self, request: Request, deadline: float, block_size: int) -> None:
        self.arrival, self.prompt, self.output, ratio = request
        self.deadline = deadline
        # as in vLLM, at least the last token of a prompt is computed
        self.cached = min(int(ratio * self.prompt), self.prompt - 1) // block_size * block_size if ratio else 0
        self.tokens = self.prompt  # to prefill: the prompt, and after a preemption what was generated too
        self.computed = 0
        self.generated = 0
        self.base = 0
        self.finish_step = -1
        self.scheduled = -1.0
        self.first_token = math.nan
        self.last_token = math.nan
        self.preemptions = 0
        self.uncounted = 0  # preemptions that the page does not show yet


class Engine:
    """One replica.

    A request joins the first iteration that starts after its arrival; an idle engine starts at once. `submit` and
    `advance` and `set_limits` must be called in order of time. The gauges are those that the last finished iteration
    wrote: as in vLLM, what arrives during an iteration shows only after the next one.

    Args:
        profile: model and hardware.
        ledger: notes every ended request.
        ttft_timeout_s: a client without its first token goes away after this long.

    Attributes:
        limits: that the next iteration to start obeys; the profile's at first.
    """

    __slots__ = (
        "_chunks",
        "_context",
        "_finishes",
        "_first",
        "_free",
        "_free_shown",
        "_growth",
        "_inbox",
        "_joined",
        "_late",
        "_leaving",
        "_mask",
        "_mixed",
        "_needs",
        "_partials",
        "_resumed",
        "_running",
        "_shift",
        "_skipped",
        "_slope",
        "_start",
        "_step",
        "_steps",
        "_timeout",
        "_total",
        "_waiting",
        "idle_since",
        "ledger",
        "limits",
        "next_event",
        "outstanding",
        "profile",
        "running",
        "tallies",
        "waiting",
    )

    def __init__(self, profile: Profile, ledger: Ledger, ttft_timeout_s: float = math.inf) -> None:
        self.profile = profile
        self.ledger = ledger
        self.limits = Limits(profile.max_num_seqs, profile.max_num_batched_tokens, profile.long_prefill_token_threshold)
        self.tallies = Tallies()
        self.running = 0
        self.waiting = 0
        self.outstanding = 0
        self.next_event = math.inf
        self.idle_since = 0.0
        self._timeout = ttft_timeout_s
        self._total = self._free = self._free_shown = profile.blocks - 1
        self._mask = profile.block_size - 1
        self._shift = self._mask.bit_length()
        # _needs[r] sequences take a new block whenever step % block_size == r; twice over, so that a slice may wrap
        self._needs = [0] * (2 * profile.block_size)
        self._running: dict[_Sequence, None] = {}  # in order of admission, those that prefill included
        self._partials: list[_Sequence] = []  # of these, those that prefill
        self._finishes: list[tuple[int, int, _Sequence]] = []
        self._joined = 0
        self._resumed: deque[_Sequence] = deque()
        self._waiting: deque[_Sequence] = deque()
        self._inbox: list[_Sequence] = []
        self._step = 0
        self._context = 0
        # the iterations under way: `_steps` of them from `_start` on, the first takes `_first`, each next `_slope` more
        self._start = 0.0
        self._first = 0.0
        self._slope = 0.0
        self._growth = profile.overhead * profile.context_s
        self._steps = 0
        self._mixed = False  # it is one iteration that carries prefill, or a token that is late
        self._chunks: list[tuple[_Sequence, int]] = []
        self._skipped: dict[_Sequence, None] = {}  # decode, but get no token in it
        self._late: dict[_Sequence, None] = {}  # got none in the one before
        self._leaving: list[_Sequence] = []  # their clients have gone

    @property
    def context_tokens(self) -> int:
        """Tokens that decoding sequences hold in the KV cache."""
        return self._context

    @property
    def kv_usage(self) -> float:
        """Share of the KV blocks that live requests held at the end of the last finished iteration."""
        return (self._total - self._free_shown) / self._total

    @property
    def free_blocks(self) -> int:
        """KV blocks that no live request holds."""
        return self._free

    def submit(self, request: Request, deadline: float | None = None) -> bool:
        """Queue a request at its arrival. False, and nothing happens, when it could never fit the KV cache.

        Args:
            deadline: when its client goes away without a first token, not before those of earlier requests; by default
                the engine's time-out after arrival.
        """
        arrival, prompt, output, _ = request
        if (prompt + output - 1 + self._mask) >> self._shift > self._total:
            return False
        if self.next_event <= arrival:
            self.run(arrival)
        self.outstanding += 1
        until = arrival + self._timeout if deadline is None else deadline
        self._inbox.append(_Sequence(request, until, self._mask + 1))
        if not self._steps:
            self._plan(arrival)
        elif self._steps > 1:
            self._end_soon(arrival)
        return True

    def set_limits(
        self,
        at: float,
        *,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        long_prefill_token_threshold: int | None = None,
    ) -> Limits:
        """Change some limits, and return all. They hold from the first iteration on that starts after `at`.

        As in a vLLM whose scheduler is told between two steps: a lower max_num_seqs only stops admission, until enough
        requests have ended; a token budget below the running requests counts as one token for each. Raises ValueError,
        and changes nothing, outside of 1 to the profile's own value, which sizes the engine's buffers; a threshold may
        be anything from 0 on.
        """
        ceiling, limits = self.profile, self.limits
        limits = Limits(
            limits.max_num_seqs if max_num_seqs is None else max_num_seqs,
            limits.max_num_batched_tokens if max_num_batched_tokens is None else max_num_batched_tokens,
            limits.long_prefill_token_threshold
            if long_prefill_token_threshold is None
            else long_prefill_token_threshold,
        )
        if not 1 <= limits.max_num_seqs <= ceiling.max_num_seqs:
            raise ValueError(f"max_num_seqs must be 1 to {ceiling.max_num_seqs}: {limits.max_num_seqs}")
        if not 1 <= limits.max_num_batched_tokens <= ceiling.max_num_batched_tokens:
            highest = ceiling.max_num_batched_tokens
            raise ValueError(f"max_num_batched_tokens must be 1 to {highest}: {limits.max_num_batched_tokens}")
        if limits.long_prefill_token_threshold < 0:
            raise ValueError(f"long_prefill_token_threshold must be 0 or more: {limits.long_prefill_token_threshold}")
        self.run(at)
        self.limits = limits
        if self._steps > 1:
            self._end_soon(at)
        return limits

    def give_up(self, at: float, key: tuple[float, int, int]) -> None:
        """Let the client of a request go away at that time, unless all is done; it ends with the iteration under way.

        Args:
            key: the request's arrival, prompt and answer.
        """
        self.run(at)
        for sequence in self._in_flight():
            if (sequence.arrival, sequence.prompt, sequence.output) == key and sequence not in self._leaving:
                self._leaving.append(sequence)
                if self._steps and not self._mixed:
                    self._end_soon(at)
                return

    def run(self, until: float) -> None:
        """Finish every jump and iteration that ends by `until`; the one under way stays as it is."""
        finishes = self._finishes
        while self.next_event <= until:
            end = self.next_event
            if self._mixed:
                self._end_mixed(end)
            else:
                self._decode(self._steps)
            if finishes and finishes[0][0] <= self._step:
                self._retire(end)
            self._write_gauges()
            self._plan(end)

    def advance(self, until: float) -> None:
        """Be as far as an observer at `until` could see: every iteration that ended by then has been counted."""
        self.run(until)
        if self._steps > 1:
            done = self._steps_to(math.nextafter(until, math.inf)) - 1
            if done > 0:
                self._start = self._end_of(done)
                self._decode(done)
                self._first += self._slope * done
                self._steps -= done
                self._write_gauges()

    def kill(self, at: float) -> int:
        """Stop at once: every request in flight fails. Return how many there were."""
        self.advance(at)
        lost = list(self._in_flight())
        for sequence in lost:
            self._note(sequence, at, Fate.KILLED)
        for group in (self._running, self._skipped, self._late, self._leaving):
            group.clear()
        self._finishes.clear()
        self._chunks, self._partials, self._mixed = [], [], False
        for queue in (self._resumed, self._waiting, self._inbox):
            queue.clear()
        self._needs = [0] * len(self._needs)
        self._free, self._context, self._steps = self._total, 0, 0
        self.outstanding, self.next_event, self.idle_since = 0, math.inf, at
        return len(lost)

    def _in_flight(self) -> Iterator[_Sequence]:
        """Yield everything that has not ended, running first."""
        yield from self._running
        yield from self._resumed
        yield from self._waiting
        yield from self._inbox

    # -- one iteration, or a run of equal ones -------------------------------------------------------------------

    def _plan(self, start: float) -> None:
        """Schedule what runs from `start` on, as vLLM's V1 scheduler would: running first, then waiting."""
        if self._inbox:
            self._waiting.extend(self._inbox)
            self._inbox.clear()
        if self._leaving:
            self._let_leave(start)
        self._start = start
        self._chunks = []
        if self._skipped:
            self._skipped = {}
        if self._waiting or self._resumed or self._partials:
            self._expire(start)
        elif not self._late and self._needs[self._step & self._mask] <= self._free:
            if self._running:
                self._mixed = False
                self._time(single=False)
            else:
                self._rest(start)
            return
        self._schedule(start)

    def _rest(self, start: float) -> None:
        """Be idle."""
        self._steps, self._mixed, self.next_event, self.idle_since = 0, False, math.inf, start

    def _schedule(self, start: float) -> None:
        """Choose the next iteration's tokens, where not all is decoding with room to go on."""
        running, partials = self._running, self._partials
        _, budget, _ = self.limits
        if budget < len(running):
            budget = len(running)
        if not partials or (len(partials) == 1 and next(reversed(running)) is partials[0]):
            free, budget, preempted = self._serve_decodes_first(start, budget)
        else:
            free, budget, preempted = self._serve_one_by_one(start, budget)
        if not preempted and budget > 0 and (self._resumed or self._waiting):
            free = self._admit(start, free, budget)
        if not running:
            self._rest(start)
            return
        self._mixed = bool(self._chunks or self._late)
        if self._mixed:
            self._free = free
        self._time(single=preempted)

    def _time(self, *, single: bool) -> None:
        """Give the planned iteration its duration, and where nothing can change as many equal ones as fit."""
        batch, context = len(self._running), self._context
        prefill, quadratic = 0, 0.0
        if self._chunks:
            batch -= len(self._partials)
            for sequence, chunk in self._chunks:
                prefill += chunk
                quadratic += chunk * (sequence.computed + chunk / 2.0)
            if self._skipped:
                batch -= len(self._skipped)
                context -= sum(sequence.base + self._step for sequence in self._skipped)
        self._first = self.profile.iteration_s(prefill, batch, context + batch, quadratic)
        self._slope = self._growth * batch
        self._steps = 1
        self.next_event = self._start + self._first
        if self._mixed or single:
            return
        finishes = self._finishes
        while finishes[0][2].finish_step != finishes[0][0]:  # preempted since
            heappop(finishes)
        steps = finishes[0][0] - self._step
        if self._free < ((steps >> self._shift) + 1) * batch:
            steps = min(steps, self._steps_that_fit(batch))
        self._steps = steps
        if self._timeout < math.inf and (self._waiting or self._resumed):
            steps = self._steps_to(self._next_deadline())
        self._end_after(steps)

    def _end_soon(self, at: float) -> None:
        """End a jump with the iteration that is under way at `at`, so that the next one can take up what is new."""
        self._end_after(self._steps_to(math.nextafter(at, math.inf)))

    def _end_after(self, steps: int) -> None:
        """End the jump after `steps` iterations."""
        self._steps = steps
        self.next_event = self._start + steps * self._first + self._slope * (steps * (steps - 1) / 2.0)

    def _end_of(self, steps: int) -> float:
        """Return when the first `steps` iterations of the jump have ended."""
        return self._start + steps * self._first + self._slope * (steps * (steps - 1) / 2.0)

    def _steps_to(self, at: float) -> int:
        """Return after how many iterations of the jump the time is `at` or later; at least 1, at most all."""
        ahead = at - self._start
        if ahead <= self._first:
            return 1
        if at >= self._end_of(self._steps):
            return self._steps
        half = self._slope / 2.0
        linear = self._first - half
        if half > 0.0:
            # half k^2 + linear k = ahead, in the form that does not cancel
            root = 2.0 * ahead / (linear + math.sqrt(linear * linear + 4.0 * half * ahead))
        else:
            root = ahead / linear
        steps = min(max(1, math.ceil(root)), self._steps)
        while steps < self._steps and self._end_of(steps) < at:
            steps += 1
        while steps > 1 and self._end_of(steps - 1) >= at:
            steps -= 1
        return steps

    def _steps_that_fit(self, batch: int) -> int:
        """Return how many iterations the free blocks allow: `batch` blocks in each `block_size` of them."""
        cycles, left = divmod(self._free, batch)
        phase = self._step & self._mask
        extra = 0
        while extra <= self._mask and self._needs[phase + extra] <= left:
            left -= self._needs[phase + extra]
            extra += 1
        return cycles * self.profile.block_size + extra

    def _decode(self, steps: int) -> None:
        """Give every decoding sequence `steps` tokens."""
        batch = len(self._running)
        phase, rest = self._step & self._mask, steps & self._mask
        self._free -= (steps >> self._shift) * batch + sum(self._needs[phase : phase + rest])
        self._step += steps
        self._context += batch * steps
        tallies = self.tallies
        tallies.generation_tokens += batch * steps
        tallies.iteration_tokens.observe(batch, steps)
        tallies.itl.observe_run(self._first, self._slope, steps, batch)
        self.ledger.add_run(self._first, self._slope, steps, batch)

    def _end_mixed(self, end: float) -> None:
        """Finish an iteration that carried prefill, or a token that was late."""
        served = len(self._running) - len(self._partials) - len(self._skipped)
        tallies = self.tallies
        self._step += 1
        self._context += served
        tallies.generation_tokens += served
        tokens = in_time = served
        if self._skipped or self._late:
            in_time -= self._settle_late(end)
        if in_time:
            tallies.itl.observe(self._first, in_time)
            self.ledger.add_run(self._first, 0.0, 1, in_time)
        prefilled = 0
        for sequence, chunk in self._chunks:
            sequence.computed += chunk
            if sequence.computed < sequence.tokens:
                continue
            prefilled += 1
            if not sequence.generated and sequence.deadline < end:
                self._abort(sequence, end)
            else:
                tokens += 1 + self._first_or_next_token(sequence, end)
        if prefilled == len(self._partials):
            self._partials = []
        else:
            self._partials = [sequence for sequence in self._partials if sequence.computed < sequence.tokens]
        if tokens:
            tallies.iteration_tokens.observe(tokens)
        self._chunks = []

    def _settle_late(self, end: float) -> int:
        """Put off what got no token, and note the wait of what got one at last. Return how many of these there were."""
        skipped = self._skipped
        caught_up = [sequence for sequence in self._late if sequence not in skipped]
        for sequence in caught_up:
            del self._late[sequence]
            latency = end - sequence.last_token
            self.tallies.itl.observe(latency)
            self.ledger.add_run(latency, 0.0, 1, 1)
        for sequence in skipped:
            if sequence not in self._late:
                self._late[sequence] = None
                sequence.last_token = self._start
            self._count_need(sequence, -1)
            sequence.base -= 1
            self._count_need(sequence, 1)
            self._expect_end(sequence, sequence.finish_step + 1)
        return len(caught_up)

    def _expect_end(self, sequence: _Sequence, step: int) -> None:
        """Note after which iteration a sequence will have all its tokens."""
        sequence.finish_step = step
        self._joined += 1
        heappush(self._finishes, (step, self._joined, sequence))

    def _first_or_next_token(self, sequence: _Sequence, end: float) -> int:
        """Let a sequence whose prefill ended yield its token and decode on. Return the computed prompt tokens."""
        tallies = self.tallies
        tallies.generation_tokens += 1
        counted = 0
        if sequence.generated:
            latency = end - sequence.last_token
            tallies.itl.observe(latency)
            self.ledger.add_run(latency, 0.0, 1, 1)
        else:
            sequence.first_token = end
            tallies.ttft.observe(end - sequence.arrival)
            counted = sequence.prompt - sequence.cached
            tallies.prompt_tokens += sequence.prompt
            tallies.cached_prompt_tokens += sequence.cached
        tallies.preemptions += sequence.uncounted
        sequence.uncounted = 0
        sequence.generated += 1
        if sequence.generated == sequence.output:
            del self._running[sequence]
            self._free += self._blocks(sequence.computed)
            self._finish(sequence, end)
            return counted
        sequence.base = sequence.computed - self._step
        self._context += sequence.computed
        self._expect_end(sequence, self._step + sequence.output - sequence.generated)
        self._count_need(sequence, 1)
        return counted

    def _retire(self, end: float) -> None:
        """End the sequences that have all their tokens."""
        finishes, step = self._finishes, self._step
        while finishes and finishes[0][0] <= step:
            key, _, sequence = heappop(finishes)
            if sequence.finish_step == key:
                self._release(sequence)
                self._finish(sequence, end)

    def _finish(self, sequence: _Sequence, end: float) -> None:
        """Note a request that ended by itself."""
        tallies, output = self.tallies, sequence.output
        first, scheduled, arrival = sequence.first_token, sequence.scheduled, sequence.arrival
        tallies.finished += 1
        tallies.e2e.observe(end - arrival)
        tallies.queue.observe(scheduled - arrival)
        tallies.inference.observe(end - scheduled)
        tallies.prefill.observe(first - scheduled)
        tallies.decode.observe(end - first)
        tallies.tpot.observe((end - first) / (output - 1) if output > 1 else 0.0)
        tallies.prompt_length.observe(sequence.prompt)
        tallies.generation_length.observe(output)
        tallies.request_preemptions.observe(sequence.preemptions)
        self.outstanding -= 1
        self.ledger.add(arrival, first, end, sequence.prompt, output, Fate.DONE)

    def _note(self, sequence: _Sequence, end: float, fate: Fate) -> None:
        self.ledger.add(sequence.arrival, sequence.first_token, end, sequence.prompt, sequence.output, fate)

    def _write_gauges(self) -> None:
        """Write what the page shows, at the end of an iteration."""
        self.running = len(self._running)
        self.waiting = len(self._waiting) + len(self._resumed)
        self._free_shown = self._free

    # -- the scheduler's parts ---------------------------------------------------------------------------------------

    def _blocks(self, tokens: int) -> int:
        return (tokens + self._mask) >> self._shift

    def _count_need(self, sequence: _Sequence, change: int) -> None:
        """Note, or with -1 forget, in which of the `block_size` phases the sequence takes a block."""
        phase = -sequence.base & self._mask
        self._needs[phase] += change
        self._needs[phase + self._mask + 1] += change

    def _release(self, sequence: _Sequence) -> None:
        """Take a decoding sequence out of the batch and free its blocks."""
        del self._running[sequence]
        computed = sequence.base + self._step
        self._context -= computed
        self._free += self._blocks(computed)
        self._count_need(sequence, -1)

    def _chunk(self, sequence: _Sequence, computed: int, budget: int) -> int:
        """Return how much of a sequence's prefill goes into one iteration."""
        return min(sequence.tokens - computed, self.limits.long_prefill_token_threshold or budget, budget)

    def _serve_decodes_first(self, start: float, budget: int) -> tuple[int, int, bool]:
        """Serve what runs, where at most one prefills and is the newest.

        Return the blocks and tokens that are left, and whether anything was preempted.
        """
        needed = self._needs[self._step & self._mask]
        preempted = needed > self._free
        if preempted:
            self._make_room(start)
            needed = self._needs[self._step & self._mask]
        free = self._free - needed
        budget -= len(self._running) - len(self._partials)
        if self._partials:
            partial = self._partials[0]
            chunk = self._chunk(partial, partial.computed, budget)
            needed = self._blocks(partial.computed + chunk) - self._blocks(partial.computed)
            if needed > free:
                before = self._free
                self._preempt(partial, start)
                return free + self._free - before, budget, True
            free -= needed
            budget -= chunk
            self._chunks.append((partial, chunk))
        return free, budget, preempted

    def _serve_one_by_one(self, start: float, budget: int) -> tuple[int, int, bool]:
        """Serve what runs in its order: where prefills run before others, these may get nothing.

        Return the blocks and tokens that are left, and whether anything was preempted.
        """
        free, preempted = self._free, False
        for sequence in list(self._running):
            if sequence not in self._running:
                break
            decodes = sequence.finish_step >= 0
            if budget <= 0:
                if decodes:
                    self._skipped[sequence] = None
                continue
            held = sequence.base + self._step if decodes else sequence.computed
            chunk = 1 if decodes else self._chunk(sequence, held, budget)
            needed = self._blocks(held + chunk) - self._blocks(held)
            while needed > free:
                before, newest, preempted = self._free, next(reversed(self._running)), True
                self._preempt(newest, start)
                free += self._free - before
                if newest is sequence:
                    return free, budget, True
            free -= needed
            budget -= chunk
            if not decodes:
                self._chunks.append((sequence, chunk))
        return free, budget, preempted

    def _admit(self, start: float, free: int, budget: int) -> int:
        """Let waiting requests join, the preempted ones first. Return the blocks left."""
        reserve, shift, mask = self.profile.reserve_prompt, self._shift, self._mask
        running, partials, chunks = self._running, self._partials, self._chunks
        seats, _, threshold = self.limits
        seats -= len(running)
        while budget > 0 and seats > 0:
            queue = self._resumed or self._waiting
            if not queue:
                break
            sequence = queue[0]
            cached = sequence.cached
            chunk = sequence.tokens - cached
            if threshold and chunk > threshold:
                chunk = threshold
            if chunk > budget:
                chunk = budget
            if ((sequence.tokens if reserve else cached + chunk) + mask) >> shift > free:
                break
            queue.popleft()
            sequence.computed = cached
            free -= (cached + chunk + mask) >> shift
            budget -= chunk
            seats -= 1
            if sequence.scheduled < 0.0:
                sequence.scheduled = start
            running[sequence] = None
            partials.append(sequence)
            chunks.append((sequence, chunk))
        return free

    def _make_room(self, start: float) -> None:
        """Preempt the newest until every older sequence has its next block."""
        free = self._free
        for sequence in list(self._running):
            if sequence not in self._running or sequence.finish_step < 0:
                break
            if (sequence.base + self._step) & self._mask:
                continue
            while not free:
                before = self._free
                newest = next(reversed(self._running))
                self._preempt(newest, start)
                free += self._free - before
                if newest is sequence:
                    return
            free -= 1

    def _preempt(self, sequence: _Sequence, start: float) -> None:
        """Send a running sequence back to the head of the queue; all that it computed is lost."""
        if sequence.finish_step < 0:
            self._partials.remove(sequence)
            del self._running[sequence]
            self._free += self._blocks(sequence.computed)
        else:
            self._release(sequence)
            sequence.generated = sequence.output - (sequence.finish_step - self._step)
            sequence.finish_step = -1
            if sequence in self._late:
                del self._late[sequence]
            else:
                sequence.last_token = start
        sequence.tokens = sequence.prompt + sequence.generated
        sequence.computed = 0
        sequence.preemptions += 1
        sequence.uncounted += 1
        self._resumed.appendleft(sequence)

    def _next_deadline(self) -> float:
        """Return the first moment at which a client that still waits for its first token goes away."""
        waiting = [sequence.deadline for sequence in self._resumed if not sequence.generated]
        if self._waiting:
            waiting.append(self._waiting[0].deadline)
        return min(waiting, default=math.inf)

    def _expire(self, now: float) -> None:
        """Drop the requests whose clients have gone."""
        while self._waiting and self._waiting[0].deadline <= now:
            self._abort(self._waiting.popleft(), now)
        if self._partials:
            for sequence in [s for s in self._partials if not s.generated and s.deadline <= now]:
                self._partials.remove(sequence)
                self._abort(sequence, now)
        if self._resumed:
            for sequence in [s for s in self._resumed if not s.generated and s.deadline <= now]:
                self._resumed.remove(sequence)
                self._abort(sequence, now)

    def _let_leave(self, now: float) -> None:
        """Drop what clients have given up, wherever it is."""
        for sequence in self._leaving:
            if sequence in self._running:
                if sequence.finish_step >= 0:
                    self._release(sequence)
                    sequence.finish_step, sequence.computed = -1, 0
                else:
                    self._partials.remove(sequence)
                self._late.pop(sequence, None)
                self._abort(sequence, now)
            for queue in (self._resumed, self._waiting):
                if sequence in queue:
                    queue.remove(sequence)
                    self._abort(sequence, now)
        self._leaving.clear()

    def _abort(self, sequence: _Sequence, now: float) -> None:
        self._running.pop(sequence, None)
        self._free += self._blocks(sequence.computed)
        self.tallies.aborted += 1
        self.outstanding -= 1
        self._note(sequence, now, Fate.TIMED_OUT)
