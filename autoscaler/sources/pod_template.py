"""What a pod template says of its pods: how they end, and the engine's own limits."""

import re
from collections.abc import Sequence

from autoscaler.core.types import Drain
from autoscaler.sources.kubernetes_objects import Json, as_object, as_objects

DEFAULT_GRACE_S = 30.0
SLEEP = re.compile(r"(?:^|\s)sleep\s+(\d+(?:\.\d+)?)(?=s?(?:$|[\s;&]))")
SHUTDOWN_TIMEOUT = re.compile(r"""(?:^|[\s"'])--shutdown[-_]timeout(?:=|\s+)["']?(\d+(?:\.\d+)?)(?![\w.])""")
MAX_NUM_SEQS = re.compile(r"""(?:^|[\s"'])--max[-_]num[-_]seqs(?:=|\s+)["']?(\d+)(?![\w.])""")


def drain_of(template: Json) -> Drain:
    """Return how the pods of a template end."""
    spec = as_object(template.get("spec"))
    containers = as_objects(spec.get("containers"))
    hooks = [hook for one in containers if (hook := as_object(as_object(one.get("lifecycle")).get("preStop")))]
    lengths = [_pre_stop_s(hook) for hook in hooks]
    said = [length for length in lengths if length is not None]
    timeouts = [float(found[-1]) for one in containers if (found := SHUTDOWN_TIMEOUT.findall(_words(one)))]
    grace = spec.get("terminationGracePeriodSeconds")
    return Drain(
        grace_s=float(grace) if isinstance(grace, int) else DEFAULT_GRACE_S,
        pre_stop_s=None if hooks and not said else max(said, default=0.0),
        drain_s=max(timeouts, default=0.0),
    )


def max_num_seqs_of(containers: Sequence[Json]) -> int | None:
    """Return the engine's batch limit: the last one of the first container that names it, as argparse would take it."""
    for container in containers:
        found = MAX_NUM_SEQS.findall(_words(container))
        if found:
            return int(found[-1])
    return None


def _pre_stop_s(hook: Json) -> float | None:
    """Return how long a preStop hook takes; None when it does not say."""
    if "sleep" in hook:
        return float(as_object(hook["sleep"]).get("seconds", 0.0))
    command = " ".join(map(str, as_object(hook.get("exec")).get("command") or ()))
    found = SLEEP.findall(command)
    return sum(map(float, found)) if found else None


def _words(container: Json) -> str:
    return " ".join(map(str, [*(container.get("command") or ()), *(container.get("args") or ())]))
