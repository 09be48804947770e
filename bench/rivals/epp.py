"""KEDA on what llm-d's endpoint picker (EPP) says: load in flight, pool saturation, tokens.

Source: llm-d main of November 2026, guides/workload-autoscaling: keda-epp, keda-epp-saturation, keda-epp-token-aware.
"""

from dataclasses import dataclass, field, replace

from autoscaler.sim.profile import Profile
from bench.rivals import ratios
from bench.rivals.base import Bounds, tuned
from bench.rivals.behavior import SYNC_S, Behavior, Hpa, Rules, percent, pods
from bench.rivals.keda import Keda, Trigger
from bench.rivals.lengths import Lengths
from bench.rivals.view import Signal, View, read

POOL = Behavior(
    up=Rules(window_s=0.0, budgets=(percent(100, 15),)), down=Rules(window_s=300.0, budgets=(percent(100, 15),))
)
TOKENS = Behavior(up=Rules(window_s=0.0, budgets=(pods(1, 180),)), down=Rules(window_s=300.0, budgets=(pods(1, 300),)))


@dataclass(frozen=True, slots=True, kw_only=True)
class EppSettings:
    """Running requests through the picker, 16 a replica, and beside it the pool's saturation.

    The saturation is a mean over the pool under `AverageValue`, so by itself it never asks for more than its cap over
    the threshold; what scales is the other trigger. None leaves saturation out: the guide's default path.
    """

    running: float = tuned(16.0, 1.0, 256.0, log=True)
    saturation: float | None = tuned(0.7, 0.3, 1.0)
    behavior: Behavior = field(default_factory=lambda: POOL)
    bounds: Bounds = field(default_factory=Bounds)

    def build(self) -> Keda:
        """Return the rival."""
        triggers = [Trigger(signal=Signal.GATEWAY_IN_FLIGHT, threshold=self.running)]
        if self.saturation is not None:
            triggers.append(Trigger(signal=Signal.SATURATION, threshold=self.saturation))
        return Keda(triggers, self.bounds, self.behavior)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenAwareSettings:
    """Seconds of prefill that wait, and pods' worth of full KV cache.

    Args:
        prefill_tokens_s: what one replica prefills per second; 15,928 is the guide's for Qwen3-32B on two H100.
        backlog_s, kv: per replica.
        lengths_s: over which the mean prompt is taken.
    """

    prefill_tokens_s: float = 15_928.0
    backlog_s: float = tuned(1.5, 0.05, 10.0, log=True)
    kv: float = tuned(0.8, 0.1, 0.95)
    lengths_s: float = 600.0
    behavior: Behavior = field(default_factory=lambda: TOKENS)
    bounds: Bounds = field(default_factory=Bounds)

    def build(self) -> "TokenAware":
        """Return the rival."""
        return TokenAware(self)


class TokenAware:
    """The larger of prefill backlog and KV occupancy.

    The picker counts the uncached prompt tokens in flight; here they are the waiting requests times the mean prompt.
    """

    interval_s = SYNC_S

    def __init__(self, settings: TokenAwareSettings) -> None:
        self.settings = settings
        self._hpa = Hpa(settings.bounds, settings.behavior)
        self._lengths = Lengths(settings.lengths_s)

    def desired(self, now: float, view: View) -> int:
        """Return the replicas after this sync."""
        settings, tolerance = self.settings, self.settings.behavior.tolerance
        self._lengths.add(now, view.gateway)
        waiting, kv = read(Signal.WAITING, view) or 0.0, read(Signal.KV, view) or 0.0
        backlog_s = waiting * (self._lengths.prompt or 0.0) / settings.prefill_tokens_s
        wishes = [
            ratios.average(view.ordered, backlog_s, settings.backlog_s, tolerance),
            ratios.average(view.ordered, kv, settings.kv, tolerance),
        ]
        return self._hpa.settle(now, view.ordered, wishes)


def calibrated(settings: TokenAwareSettings, profile: Profile) -> TokenAwareSettings:
    """Return the settings for a profile: one full chunk over its time on an idle replica, as the guide measures it."""
    chunk = profile.max_num_batched_tokens
    return replace(settings, prefill_tokens_s=chunk / profile.iteration_s(chunk, 0, 0, chunk * chunk / 2.0))
