"""Rate and mean lengths of the requests of late, from a gateway's counts."""

from collections import deque

from bench.rivals.view import Gateway


class Lengths:
    """What arrived over the last `length_s` seconds; None everywhere while nothing did.

    Args:
        length_s: how far back to look [s].
    """

    def __init__(self, length_s: float) -> None:
        self.length_s = length_s
        self._seen: deque[tuple[float, Gateway]] = deque()

    def add(self, now: float, gateway: Gateway) -> None:
        """Note the counts; the newest that is at least `length_s` old stays as the base."""
        self._seen.append((now, gateway))
        while len(self._seen) > 2 and self._seen[1][0] <= now - self.length_s:
            self._seen.popleft()

    @property
    def seconds(self) -> float:
        """The time between base and newest [s]."""
        return self._seen[-1][0] - self._seen[0][0] if self._seen else 0.0

    @property
    def requests(self) -> int:
        """How many arrived."""
        return self._seen[-1][1].requests - self._seen[0][1].requests if self._seen else 0

    @property
    def rate(self) -> float | None:
        """Requests per second."""
        return self.requests / self.seconds if self.seconds > 0.0 else None

    @property
    def prompt(self) -> float | None:
        """Mean prompt [tokens]."""
        if not self.requests:
            return None
        return (self._seen[-1][1].prompt_tokens - self._seen[0][1].prompt_tokens) / self.requests

    @property
    def output(self) -> float | None:
        """Mean answer [tokens]."""
        if not self.requests:
            return None
        return (self._seen[-1][1].output_tokens - self._seen[0][1].output_tokens) / self.requests
