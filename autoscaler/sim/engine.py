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
from autoscaler.sim.profile import Profile as Profile
from autoscaler.sim.profiles import profile, profile_names
from autoscaler.sim.tally import Tallies

PROFILES = {name: profile(name) for name in profile_names()}


class Request(NamedTuple):
    """One request as a client sends it: when [s], and the tokens that it brings and will get."""

    arrival: float
    prompt_tokens: int
    output_tokens: int


class _Sequence:
    """One request inside the engine.

    Once it decodes, it holds `base + step` tokens in the KV cache, where `step` is the engine's count of iterations,
    and ends when `step` reaches `finish_step`.
    """

    __slots__ = (
        "arrival",
        "base",
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

    def __init__(self, request: Request, deadline: float) -> None:
        self.arrival, self.prompt, self.output = request
        self.deadline = deadline
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
    `advance` must be called in order of time. The gauges are those that the last finished iteration wrote: as in vLLM,
    what arrives during an iteration shows only after the next one.

    Args:
        profile: model and hardware.
        ledger: notes every ended request.
        ttft_timeout_s: a client without its first token goes away after this long.
    """

    __slots__ = (
        "_chunks",
        "_context",
        "_decoding",
        "_finishes",
        "_first",
        "_free",
        "_inbox",
        "_joined",
        "_mask",
        "_needs",
        "_partial",
        "_resumed",
        "_shift",
        "_slope",
        "_start",
        "_step",
        "_steps",
        "_timeout",
        "_total",
        "_waiting",
        "idle_since",
        "kv_usage",
        "ledger",
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
        self.tallies = Tallies()
        self.running = 0
        self.waiting = 0
        self.kv_usage = 0.0
        self.outstanding = 0
        self.next_event = math.inf
        self.idle_since = 0.0
        self._timeout = ttft_timeout_s
        self._total = self._free = profile.blocks - 1
        self._mask = profile.block_size - 1
        self._shift = self._mask.bit_length()
        # _needs[r] sequences take a new block whenever step % block_size == r; twice over, so that a slice may wrap
        self._needs = [0] * (2 * profile.block_size)
        self._decoding: dict[_Sequence, None] = {}
        self._finishes: list[tuple[int, int, _Sequence]] = []
        self._joined = 0
        self._partial: _Sequence | None = None
        self._resumed: deque[_Sequence] = deque()
        self._waiting: deque[_Sequence] = deque()
        self._inbox: list[_Sequence] = []
        self._step = 0
        self._context = 0
        # the iterations under way: `_steps` of them from `_start` on, the first takes `_first`, each next `_slope` more
        self._start = 0.0
        self._first = 0.0
        self._slope = 0.0
        self._steps = 0
        self._chunks: list[tuple[_Sequence, int]] = []

    @property
    def context_tokens(self) -> int:
        """Tokens that decoding sequences hold in the KV cache."""
        return self._context

    @property
    def free_blocks(self) -> int:
        """KV blocks that no live request holds."""
        return self._free

    def submit(self, request: Request, deadline: float | None = None) -> bool:
        """Queue a request at its arrival. False, and nothing happens, when it could never fit the KV cache.

        Args:
            deadline: when its client goes away without a first token; by default the engine's time-out after arrival.
        """
        if self._blocks(request.prompt_tokens + request.output_tokens - 1) > self._total:
            return False
        arrival = request.arrival
        self.run(arrival)
        self.outstanding += 1
        self._inbox.append(_Sequence(request, arrival + self._timeout if deadline is None else deadline))
        if not self._steps:
            self._plan(arrival)
        elif not self._chunks:
            self._end_after(self._steps_to(math.nextafter(arrival, math.inf)))
        return True

    def run(self, until: float) -> None:
        """Finish every jump and iteration that ends by `until`; the one under way stays as it is."""
        while self.next_event <= until:
            end = self.next_event
            if self._chunks:
                self._end_mixed(end)
            else:
                self._decode(self._steps)
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
        self._decoding.clear()
        self._finishes.clear()
        self._chunks = []
        self._partial = None
        for queue in (self._resumed, self._waiting, self._inbox):
            queue.clear()
        self._needs = [0] * len(self._needs)
        self._free, self._context, self._steps = self._total, 0, 0
        self.outstanding, self.next_event, self.idle_since = 0, math.inf, at
        return len(lost)

    def _in_flight(self) -> Iterator[_Sequence]:
        """Yield everything that has not ended, running first."""
        yield from self._decoding
        joined = {sequence for sequence, _ in self._chunks}
        yield from joined
        if self._partial is not None and self._partial not in joined:
            yield self._partial
        yield from self._resumed
        yield from self._waiting
        yield from self._inbox

    # -- one iteration, or a run of equal ones -------------------------------------------------------------------

    def _plan(self, start: float) -> None:
        """Schedule what runs from `start` on, as vLLM's V1 scheduler would: running first, then waiting."""
        if self._inbox:
            self._waiting.extend(self._inbox)
            self._inbox.clear()
        if self._waiting or self._resumed or self._partial is not None:
            self._expire(start)
        self._start = start
        self._chunks = []
        needed = self._needs[self._step & self._mask]
        preempted = needed > self._free
        if preempted:
            self._make_room(start)
            needed = self._needs[self._step & self._mask]
        batch, partial = len(self._decoding), self._partial
        if partial is not None or self._waiting or self._resumed:
            free = self._schedule_prefills(start, self._free - needed, preempted)
            if self._chunks:
                self._free = free
            elif partial is not None:
                preempted = True
        if not batch and not self._chunks:
            self._steps, self.next_event, self.idle_since = 0, math.inf, start
            return
        self._time(batch, single=preempted)

    def _time(self, batch: int, *, single: bool) -> None:
        """Give the planned iteration its duration, and where nothing can change as many equal ones as fit."""
        profile = self.profile
        prefill, quadratic = 0, 0.0
        for sequence, chunk in self._chunks:
            prefill += chunk
            quadratic += chunk * (sequence.computed + chunk / 2.0)
        self._first = profile.iteration_s(prefill, batch, self._context + batch, quadratic)
        self._slope = profile.overhead * profile.context_s * batch
        self._steps = 1
        self.next_event = self._start + self._first
        if self._chunks or single:
            return
        finishes = self._finishes
        while finishes[0][2].finish_step != finishes[0][0]:  # preempted since
            heappop(finishes)
        steps = finishes[0][0] - self._step
        if self._free < (steps // self.profile.block_size + 1) * batch:
            steps = min(steps, self._steps_that_fit(batch))
        self._steps = steps
        if self._timeout < math.inf and (self._waiting or self._resumed):
            steps = self._steps_to(self._next_deadline())
        self._end_after(steps)

    def _end_after(self, steps: int) -> None:
        """End the jump after `steps` iterations."""
        self._steps = steps
        self.next_event = self._end_of(steps)

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
        batch = len(self._decoding)
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
        """Finish an iteration that carried prefill."""
        batch = len(self._decoding)
        tallies = self.tallies
        self._step += 1
        self._context += batch
        tokens = batch
        if batch:
            tallies.itl.observe(self._first, batch)
            self.ledger.add_run(self._first, 0.0, 1, batch)
        self._partial = None
        for sequence, chunk in self._chunks:
            sequence.computed += chunk
            if sequence.computed < sequence.tokens:
                self._partial = sequence
            elif not sequence.generated and sequence.deadline < end:
                self._abort(sequence, end)
            else:
                tokens += 1 + self._first_or_next_token(sequence, end)
        if tokens:
            tallies.iteration_tokens.observe(tokens)
        tallies.generation_tokens += batch
        self._chunks = []

    def _first_or_next_token(self, sequence: _Sequence, end: float) -> int:
        """Let a sequence whose prefill ended yield its token and decode on. Return the prompt tokens to count."""
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
            counted = sequence.prompt
            tallies.prompt_tokens += counted
        tallies.preemptions += sequence.uncounted
        sequence.uncounted = 0
        sequence.generated += 1
        if sequence.generated == sequence.output:
            self._free += self._blocks(sequence.computed)
            self._finish(sequence, end)
            return counted
        sequence.base = sequence.computed - self._step
        sequence.finish_step = self._step + sequence.output - sequence.generated
        self._decoding[sequence] = None
        self._context += sequence.computed
        self._joined += 1
        heappush(self._finishes, (sequence.finish_step, self._joined, sequence))
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
        self._note(sequence, end, Fate.DONE)

    def _note(self, sequence: _Sequence, end: float, fate: Fate) -> None:
        self.ledger.add(sequence.arrival, sequence.first_token, end, sequence.prompt, sequence.output, fate)

    def _write_gauges(self) -> None:
        """Write what the page shows, at the end of an iteration."""
        self.running = len(self._decoding) + (self._partial is not None)
        self.waiting = len(self._waiting) + len(self._resumed)
        self.kv_usage = (self._total - self._free) / self._total

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
        del self._decoding[sequence]
        computed = sequence.base + self._step
        self._context -= computed
        self._free += self._blocks(computed)
        self._count_need(sequence, -1)

    def _schedule_prefills(self, start: float, free: int, preempted: bool) -> int:
        """Choose this iteration's prefill chunks. Return the blocks left, if any chunk was chosen."""
        profile = self.profile
        batch = len(self._decoding)
        budget = profile.max_num_batched_tokens - batch
        seats = profile.max_num_seqs - batch
        partial = self._partial
        if partial is not None:
            chunk = min(partial.tokens - partial.computed, budget)
            needed = self._blocks(partial.computed + chunk) - self._blocks(partial.computed)
            if needed > free:
                self._preempt(partial, start)
                return free
            free -= needed
            budget -= chunk
            seats -= 1
            self._chunks.append((partial, chunk))
        while budget > 0 and seats > 0 and not preempted:
            queue = self._resumed or self._waiting
            if not queue:
                break
            sequence = queue[0]
            chunk = min(sequence.tokens, budget)
            if self._blocks(sequence.tokens if profile.reserve_prompt else chunk) > free:
                break
            queue.popleft()
            free -= self._blocks(chunk)
            budget -= chunk
            seats -= 1
            if sequence.scheduled < 0.0:
                sequence.scheduled = start
            self._chunks.append((sequence, chunk))
        return free

    def _make_room(self, start: float) -> None:
        """Preempt the newest until every older sequence has its next block."""
        free = self._free
        for sequence in list(self._decoding):
            if sequence not in self._decoding:
                break
            if (sequence.base + self._step) & self._mask:
                continue
            while not free:
                before = self._free
                newest = self._partial or next(reversed(self._decoding))
                self._preempt(newest, start)
                free += self._free - before
                if newest is sequence:
                    return
            free -= 1

    def _preempt(self, sequence: _Sequence, start: float) -> None:
        """Send a running sequence back to the head of the queue; all that it computed is lost."""
        if sequence is self._partial:
            self._partial = None
            self._free += self._blocks(sequence.computed)
        else:
            self._release(sequence)
            sequence.generated = sequence.output - (sequence.finish_step - self._step)
            sequence.finish_step = -1
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
        partial = self._partial
        if partial is not None and not partial.generated and partial.deadline <= now:
            self._partial = None
            self._abort(partial, now)
        for sequence in [s for s in self._resumed if not s.generated and s.deadline <= now]:
            self._resumed.remove(sequence)
            self._abort(sequence, now)

    def _abort(self, sequence: _Sequence, now: float) -> None:
        self._free += self._blocks(sequence.computed)
        self.tallies.aborted += 1
        self.outstanding -= 1
        self._note(sequence, now, Fate.TIMED_OUT)
