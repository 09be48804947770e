"""What the parts are made of in each mode, and who is told of a tick."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from structlog.typing import FilteringBoundLogger

from autoscaler import __version__
from autoscaler.actuators import ACTUATORS
from autoscaler.actuators.deletion_cost import MarkingActuator
from autoscaler.actuators.deployment import ScaleApi
from autoscaler.actuators.gate import PatientActuator
from autoscaler.core.forecast import learned_horizon
from autoscaler.core.policy import BatchingMode, Policy, PrometheusServer, VllmSignals
from autoscaler.core.state import State
from autoscaler.core.types import Decision, Outcome, Snapshot, TargetStatus
from autoscaler.errors import Problem, TargetError
from autoscaler.loop import Parts
from autoscaler.policy_file import policy_to_plain
from autoscaler.ports import Actuator, Clock, Report, Source
from autoscaler.sources.cluster import ClusterCaches
from autoscaler.sources.deployment import DeploymentTarget
from autoscaler.telemetry import Telemetry
from autoscaler.telemetry.logs import HIDDEN
from autoscaler.trace import Recorder
from autoscaler.web.server import Health

if TYPE_CHECKING:
    from autoscaler.sources.plugin_api import PluginApi

SCRAPE_EVERY_S = 0.005
"""Scrapes of one target start this far apart: 200 pods in one second."""
MAX_SPREAD_SHARE = 0.5
ANSWERED = frozenset({"target_not_found", "forbidden"})
"""Why a target cannot be read although the API server has said all that there is to know of it."""


def say_nothing(_policy: str, _result: str, _detail: str) -> None:
    """Take no note of it."""


def live_parts(
    policy: Policy,
    caches: ClusterCaches,
    clock: Clock,
    *,
    dry_run: bool,
    marked: Callable[[str, str, str], None] = say_nothing,
    limited: Callable[[str, str, str], None] = say_nothing,
) -> Parts:
    """Return the parts of a policy on a cluster; policies share what is watched of it.

    Args:
        marked: is told the policy, and what became of each deletion cost that a step down needed.
        limited: is told the policy, a pod that was told batching limits, and "" or why it did not take them.
    """
    return Parts(
        target=DeploymentTarget(caches, policy.target, templates=policy.batching.rolls_out),
        sources=live_sources(policy, clock),
        actuator=_actuator(policy, caches.api, clock, dry_run or policy.dry_run, marked, limited),
    )


def _actuator(
    policy: Policy,
    api: ScaleApi,
    clock: Clock,
    dry_run: bool,
    marked: Callable[[str, str, str], None],
    limited: Callable[[str, str, str], None],
) -> Actuator:
    actuator = ACTUATORS["dry-run" if dry_run else "live"](api, policy.target)
    victims = policy.scale_down.victims
    if dry_run:
        return actuator
    if policy.batching.mode is not BatchingMode.OFF and policy.signals.vllm is not None:
        from autoscaler.actuators.batching import BatchingActuator

        actuator = BatchingActuator(actuator, plugin_api(policy), partial(limited, policy.name))
    if victims.order != "cluster":
        told = partial(marked, policy.name)
        actuator = MarkingActuator(actuator, api, policy.target, on_failure=victims.on_failure, told=told)
    patient = PatientActuator(actuator, clock)
    if not policy.batching.rolls_out:
        return patient
    from autoscaler.actuators.rollout import RolloutActuator, TemplateActuator

    return RolloutActuator(patient, PatientActuator(TemplateActuator(api, policy.target), clock))


def live_sources(policy: Policy, clock: Clock) -> tuple[Source, ...]:
    """Return the sources that the policy asks for. A source's module is imported only when it is used."""
    signals = policy.signals
    sources: list[Source] = []
    if signals.vllm is not None and signals.vllm.prometheus is not None:
        from autoscaler.sources.prometheus import PrometheusVllmSource

        server = _server(policy, signals.vllm.prometheus)
        sources.append(PrometheusVllmSource(signals.vllm, server, clock))
    elif signals.vllm is not None:
        from autoscaler.sources.vllm import VllmSource

        pods = policy.most_replicas * policy.target.pods_per_replica
        spread_s = min(MAX_SPREAD_SHARE * policy.interval_s, SCRAPE_EVERY_S * pods)
        sources.append(VllmSource(signals.vllm, clock, spread_s=spread_s))
    if policy.batching.mode is not BatchingMode.OFF and signals.vllm is not None:
        from autoscaler.sources.plugin import PluginSource

        sources.append(PluginSource(plugin_api(policy), clock, stale_after_s=signals.vllm.stale_after_s))
    if signals.dcgm is not None and signals.dcgm.prometheus is not None:
        from autoscaler.sources.prometheus import PrometheusDcgmSource

        sources.append(PrometheusDcgmSource(signals.dcgm, _server(policy, signals.dcgm.prometheus), clock))
    elif signals.dcgm is not None:
        from autoscaler.sources.dcgm import DcgmSource

        sources.append(DcgmSource(signals.dcgm, clock))
    if signals.nvml is not None:
        from autoscaler.sources.nvml import NvmlSource

        sources.append(NvmlSource(signals.nvml, clock))
    if signals.queries:
        from autoscaler.sources.prometheus import PromQuerySource

        servers = {query.server: _server(policy, query.server) for query in signals.queries}
        sources.append(PromQuerySource(signals.queries, servers, clock))
    return tuple(sources)


def plugin_api(policy: Policy) -> "PluginApi":
    """Return what asks the plugin inside the policy's pods."""
    from autoscaler.sources.plugin_api import PluginApi

    vllm = policy.signals.vllm or VllmSignals()
    return PluginApi(policy.batching.plugin, scheme=vllm.scheme, port=vllm.port)


def _server(policy: Policy, name: str) -> PrometheusServer:
    server = policy.signals.server(name)
    if server is None:  # `complaints` refuses such a policy
        raise AssertionError(f"policy {policy.name} names the unknown server {name}")
    return server


class Watchers:
    """Tells everybody who wants to know: logs and metrics, health, the recording, and whoever looks on.

    Args:
        dry_run: the whole process is in dry-run, whatever a policy says.
        reports: told of each tick after the others.
        remember: is told of each policy's state after its tick.
    """

    def __init__(
        self,
        telemetry: Telemetry,
        health: Health,
        recorder: Recorder | None = None,
        *,
        dry_run: bool = False,
        reports: Sequence[Report] = (),
        remember: Callable[[Policy, State], None] | None = None,
    ) -> None:
        self._telemetry = telemetry
        self._health = health
        self._recorder = recorder
        self._dry_run = dry_run
        self._reports = tuple(reports)
        self._remember = remember
        self._policies: dict[str, Policy] = {}
        self._said_failure = False
        self.failures: dict[str, str] = {}

    def started(self, policy: Policy) -> None:
        """Take note of a policy that begins, or goes on changed."""
        self._policies[policy.name] = policy
        self._telemetry.loaded(policy, dry_run=self._dry_run)
        self._health.watch(policy.name, policy.interval_s)
        if self._recorder is not None:
            self._recorder.policy(policy.name, recordable(policy))

    def tick(self, policy: str, snapshot: Snapshot, decision: Decision, outcome: Outcome, duration_s: float) -> None:
        """Pass a completed tick on."""
        self.failures.pop(policy, None)
        if self._recorder is not None:  # first: what the log has shown, a killed process has recorded
            self._recorder.tick(policy, snapshot, decision, outcome, duration_s)
            if self._recorder.failure is not None and not self._said_failure:
                self._said_failure = True
                self._telemetry.recording_failed(self._recorder.failure)
        self._telemetry.tick(policy, snapshot, decision, outcome, duration_s)
        self._health.completed(policy)
        for report in self._reports:
            report.tick(policy, snapshot, decision, outcome, duration_s)

    def error(self, policy: str, kind: str, error: BaseException) -> None:
        """Pass an error on. A target that cannot be read is no reason to kill the process; a bug is."""
        self.failures[policy] = str(error)
        self._telemetry.error(policy, kind, error)
        for report in self._reports:
            if isinstance(report, _Troubled):
                report.error(policy, kind, error)
        if kind == "target":
            known = isinstance(error, TargetError) and error.reason in ANSWERED
            self._health.completed(policy, seen=known)

    def overrun(self, policy: str) -> None:
        """Pass an overrun on."""
        self._telemetry.overrun(policy)

    def learned(self, policy: str, state: State) -> None:
        """Remember the state, and show what has been learned."""
        if self._remember is not None:
            self._remember(self._policies[policy], state)
        if state.model is None:
            return
        line, settings = state.model.line, self._policies[policy]
        horizon_s = learned_horizon(settings.prediction, state.starts, settings.interval_s) if state.starts else None
        self._telemetry.learned(policy, line.c0, line.cp, line.cb, line.ck, state.model.rows, horizon_s)

    def reloaded(self, policies: Mapping[str, Policy], problems: Sequence[Problem]) -> None:
        """Forget what is gone, and say how the reload went."""
        for name in self._policies.keys() - policies.keys():
            del self._policies[name]
            self._telemetry.forget(name)
            self._health.forget(name)
        self._telemetry.reload("rejected" if problems else "applied", problems)


@runtime_checkable
class _Troubled(Protocol):
    """A report that also wants to know of errors."""

    def error(self, policy: str, kind: str, error: BaseException) -> None:
        """Take note of an error of the tick under way."""
        ...


@runtime_checkable
class Reporting(Protocol):
    """A source that can say how what it reads names the target's pods."""

    def report(self, target: TargetStatus) -> object:
        """Return what `str` makes one line for people of."""
        ...


class FirstTicks:
    """Says once for each target, after its first tick, what an operator should know of how it is read."""

    def __init__(self, log: FilteringBoundLogger) -> None:
        self._log = log
        self._parts: dict[str, Parts] = {}
        self._said: set[tuple[str, str]] = set()

    def built(self, policy: Policy, parts: Parts) -> None:
        """Take note of what a policy is going to run on."""
        self._parts[policy.name] = parts

    def tick(self, policy: str, snapshot: Snapshot, decision: Decision, outcome: Outcome, duration_s: float) -> None:
        """Look at the parts after their first tick."""
        parts = self._parts.pop(policy, None)
        target = snapshot.target
        if parts is None or (target.namespace, target.name) in self._said:
            return
        self._said.add((target.namespace, target.name))
        log = self._log.bind(policy=policy, target=f"{target.namespace}/{target.name}")
        if isinstance(parts.target, DeploymentTarget) and parts.target.hpa_visible is False:
            log.warning(
                "hpas_not_visible", detail="another autoscaler of this target would not be noticed: see the Role"
            )
        for source in parts.sources:
            if isinstance(source, Reporting):
                log.info("attribution", source=source.name, detail=str(source.report(target)))


def recordable(policy: Policy) -> dict[str, Any]:
    """Return the policy's plain form for a recording, which is handed around: without what headers say."""
    servers = {
        name: replace(server, headers=dict.fromkeys(server.headers, HIDDEN))
        for name, server in policy.signals.prometheus.items()
    }
    return policy_to_plain(replace(policy, signals=replace(policy.signals, prometheus=servers)))


def open_recorder(path: Path, now: float) -> tuple[Recorder, Path]:
    """Return a recorder and the file it writes: `path`, or where that holds something a name with the time in it.

    A restarted process goes on, and no recording is ever overwritten. Raises TraceError.
    """
    chosen, number = path, 0
    while _holds_data(chosen):
        stamp = datetime.fromtimestamp(now + number, UTC).strftime("%Y%m%dT%H%M%SZ")
        name, dot, suffix = path.name.partition(".")
        chosen = path.with_name(f"{name}-{stamp}{dot}{suffix}")
        number += 1
    return Recorder(chosen, f"autoscaler {__version__}"), chosen


def _holds_data(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except OSError:  # not there, or not ours to see: opening it will tell
        return False


def fingerprint(paths: Sequence[Path]) -> tuple[tuple[str, int, int], ...]:
    """Return a value that changes when any policy file does: each file's name, size and modification time.

    Follows links, so that a ConfigMap's swap of its `..data` link shows.
    """
    found = []
    for path in paths:
        try:
            files = sorted(file for file in path.iterdir() if file.name[0] != ".") if path.is_dir() else [path]
        except OSError:
            continue
        for file in files:
            try:
                status = file.stat()
            except OSError:
                continue
            found.append((str(file), status.st_size, status.st_mtime_ns))
    return tuple(found)
