"""vLLM's scheduler written for reading: one iteration at a time, every request looked at in each of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from autoscaler.sim.engine import Limits, Request
from autoscaler.sim.profile import Profile


@dataclass(eq=False)
class Job:
    """One request in the reference scheduler."""

    request: Request
    cached: int = 0
    computed: int = 0
    tokens: list[float] = field(default_factory=list)
    scheduled: float | None = None
    preemptions: int = 0
    decoding: bool = False
    end: float | None = None
    failed: bool = False

    @property
    def length(self) -> int:
        """Prompt and generated tokens."""
        return self.request.prompt_tokens + len(self.tokens)


@dataclass
class Iteration:
    """One finished iteration: when, how long, how much, and the gauges at its end."""

    start: float
    end: float
    latencies: list[float]
    tokens: int
    running: int
    waiting: int
    free: int


class Reference:
    """Runs a list of requests through one replica to the end.

    Args:
        timeout_s: clients without a first token go away after this long.
        changes: when which limits are set, in order of time.

    Attributes:
        skips: how often a decoding request got no token in an iteration.
    """

    def __init__(self, profile: Profile, timeout_s: float, changes: Sequence[tuple[float, Limits]] = ()) -> None:
        self.profile = profile
        self.timeout_s = timeout_s
        self.changes = list(changes)
        self.limits = Limits(profile.max_num_seqs, profile.max_num_batched_tokens, profile.long_prefill_token_threshold)
        self.total = profile.blocks - 1
        self.running: list[Job] = []
        self.waiting: list[Job] = []
        self.iterations: list[Iteration] = []
        self.skips = 0

    def blocks(self, tokens: int) -> int:
        """Blocks for that many tokens."""
        return -(-tokens // self.profile.block_size)

    @property
    def free(self) -> int:
        """Blocks that nobody holds between two iterations."""
        return self.total - sum(self.blocks(job.computed) for job in self.running)

    def run(self, requests: list[Request]) -> list[Job]:
        """Return every request with the times of its tokens."""
        jobs = [Job(request, self.cached(request)) for request in requests]
        arriving = [job for job in jobs if self.fits(job)]
        now = 0.0
        while arriving or self.waiting or self.running:
            if not self.waiting and not self.running:
                now = max(now, arriving[0].request.arrival)
                self.waiting.append(arriving.pop(0))
            while arriving and arriving[0].request.arrival < now:
                self.waiting.append(arriving.pop(0))
            while self.changes and self.changes[0][0] < now:
                self.limits = self.changes.pop(0)[1]
            self.drop_expired(now)
            if self.waiting or self.running:
                now = self.iterate(now)
        return jobs

    def cached(self, request: Request) -> int:
        """Tokens of the prompt that the prefix cache holds: whole blocks, and never the last token."""
        hit = min(int(request.cached_ratio * request.prompt_tokens), request.prompt_tokens - 1)
        return hit - hit % self.profile.block_size

    def fits(self, job: Job) -> bool:
        """Could it ever run to its end?"""
        return self.blocks(job.request.prompt_tokens + job.request.output_tokens - 1) <= self.total

    def gone(self, job: Job, now: float) -> bool:
        """Has its client gone?"""
        return not job.tokens and job.request.arrival + self.timeout_s <= now

    def drop_expired(self, now: float) -> None:
        """Abort what nobody waits for any more."""
        for queue in (self.running, self.waiting):
            for job in [job for job in queue if self.gone(job, now)]:
                queue.remove(job)
                job.failed, job.end, job.computed = True, now, 0

    def schedule(self, now: float) -> dict[Job, int]:
        """Choose each job's tokens of this iteration."""
        chosen: dict[Job, int] = {}
        budget, free, preempted = max(self.limits.max_num_batched_tokens, len(self.running)), self.free, False
        index = 0
        while index < len(self.running) and budget > 0:
            job = self.running[index]
            count = self.chunk(job.length - job.computed, budget)
            needed = self.blocks(job.computed + count) - self.blocks(job.computed)
            while needed > free:
                victim = self.running.pop()
                free += self.blocks(victim.computed)
                victim.computed, victim.decoding = 0, False
                victim.preemptions += 1
                self.waiting.insert(0, victim)
                preempted = True
                if victim is job:
                    break
            if job not in self.running:
                break
            free -= needed
            chosen[job] = count
            budget -= count
            index += 1
        self.skips += sum(job.decoding and job not in chosen for job in self.running)
        while self.waiting and budget > 0 and not preempted and len(self.running) < self.limits.max_num_seqs:
            job = self.waiting[0]
            count = self.chunk(job.length - job.cached, budget)
            if self.blocks(job.length if self.profile.reserve_prompt else job.cached + count) > free:
                break
            job.computed = job.cached
            self.waiting.pop(0)
            self.running.append(job)
            if job.scheduled is None:
                job.scheduled = now
            chosen[job] = count
            free -= self.blocks(job.cached + count)
            budget -= count
        return chosen

    def chunk(self, left: int, budget: int) -> int:
        """Tokens of one request in one iteration."""
        threshold = self.limits.long_prefill_token_threshold
        return min(left, budget, threshold) if threshold else min(left, budget)

    def iterate(self, now: float) -> float:
        """Run one iteration. Return its end."""
        chosen = self.schedule(now)
        decoding = [job for job in chosen if job.decoding]
        prefill = {job: count for job, count in chosen.items() if job not in decoding}
        quadratic = sum(count * (job.computed + count / 2) for job, count in prefill.items())
        context = sum(job.computed + 1 for job in decoding)
        end = now + self.profile.iteration_s(sum(prefill.values()), len(decoding), context, quadratic)
        latencies, tokens = [], 0
        for job, count in chosen.items():
            job.computed += count
            if job.computed < job.length:
                continue
            if not job.tokens and job.request.arrival + self.timeout_s < end:
                self.running.remove(job)
                job.failed, job.end, job.computed = True, end, 0
                continue
            if job.tokens:
                latencies.append(end - job.tokens[-1])
                tokens += 1
            else:
                tokens += 1 + job.request.prompt_tokens - job.cached
            job.tokens.append(end)
            job.decoding = True
            if len(job.tokens) == job.request.output_tokens:
                self.running.remove(job)
                job.end = end
        self.iterations.append(Iteration(now, end, latencies, tokens, len(self.running), len(self.waiting), self.free))
        return end
