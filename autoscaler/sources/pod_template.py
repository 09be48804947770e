"""What a pod template says of its pods: how they end, the engine's limits, and whether these can be changed there."""

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence

from autoscaler.core.arguments import EngineWords, masked, read_engine
from autoscaler.core.note import NOTE
from autoscaler.core.types import FIELD_MANAGER, Drain, Template
from autoscaler.sources.kubernetes_objects import Json, as_object, as_objects, count_of, metadata_of, template_writers

DEFAULT_GRACE_S = 30.0
SLEEP = re.compile(r"(?:^|\s)sleep\s+(\d+(?:\.\d+)?)(?=s?(?:$|[\s;&]))")
SHUTDOWN_TIMEOUT = re.compile(r"""(?:^|[\s"'])--shutdown[-_]timeout(?:=|\s+)["']?(\d+(?:\.\d+)?)(?![\w.])""")
PERCENT = re.compile(r"(\d+)%")
DEFAULT_SHARE = "25%"
GITOPS_MANAGERS = re.compile(
    r"argocd|argo-cd|kustomize-controller|helm-controller|fleet|config-sync|configsync", re.IGNORECASE
)
"""Field managers of controllers that apply a manifest again and again, whatever kind of write they do it by."""
GITOPS_MARKS: Mapping[str, str] = {
    "argocd.argoproj.io/": "Argo CD",
    "kustomize.toolkit.fluxcd.io/": "Flux",
    "helm.toolkit.fluxcd.io/": "Flux",
    "configmanagement.gke.io/": "Config Sync",
}
"""Prefixes of the labels and annotations by which they mark what is theirs."""
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
    return " ".join(words_of(container))


# --- the batching limits --------------------------------------------------------------------------------------------


def template_of(deployment: Json, newest: str) -> Template:
    """Return what a Deployment's pod template says of batching limits, and of changing them there.

    Args:
        newest: label `pod-template-hash` of the newest ReplicaSet.
    """
    spec = as_object(deployment.get("spec"))
    pods = as_object(as_object(spec.get("template")).get("spec"))
    container, said = _engine(as_objects(pods.get("containers")))
    strategy = as_object(spec.get("strategy"))
    replicas, rolling = count_of(spec, "replicas"), as_object(strategy.get("rollingUpdate"))
    note = as_object(metadata_of(deployment).get("annotations")).get(NOTE)
    return Template(
        revision=newest,
        container=container,
        limits=said.limits,
        chunked_prefill=said.chunked_prefill,
        max_model_len=said.max_model_len,
        fixed=said.fixed,
        owner=_template_owner(deployment),
        recreate=strategy.get("type") == "Recreate",
        max_surge=_share(rolling.get("maxSurge", DEFAULT_SHARE), replicas, math.ceil),
        max_unavailable=_share(rolling.get("maxUnavailable", DEFAULT_SHARE), replicas, math.floor),
        print=_print(pods),
        note=note if isinstance(note, str) else "",
    )


def words_of(container: Json) -> list[str]:
    """Return the words that start a container: its command, then its arguments."""
    return list(map(str, [*(container.get("command") or ()), *(container.get("args") or ())]))


def _engine(containers: Sequence[Json]) -> tuple[str, EngineWords]:
    """Return the container whose words say batching limits, and what they say; of several none is chosen."""
    read = [(str(one.get("name", "")), read_engine(words_of(one))) for one in containers]
    found = [(name, said) for name, said in read if said.said]
    if len(found) > 1:
        return "", EngineWords(fixed=f"several containers say limits: {', '.join(name for name, _ in found)}")
    if found:
        return found[0]
    # None says any: the first has the word, as `kubectl logs` takes it.
    return read[0] if read else ("", EngineWords(fixed="the pod template has no containers"))


def _template_owner(deployment: Json) -> str:
    """Return who applies the template again and again; "" for nobody.

    Who has applied it once by hand, as `kubectl apply`, `helm upgrade` and an editor do, is not waiting to undo us.
    Server-side apply is another matter: it is a claim to the field, which the next one would win.
    """
    metadata = metadata_of(deployment)
    for marks in (as_object(metadata.get("labels")), as_object(metadata.get("annotations"))):
        for key in sorted(marks):
            who = next((who for prefix, who in GITOPS_MARKS.items() if key.startswith(prefix)), "")
            if who:
                return f"{who} ({key})"
    for entry in template_writers(deployment):
        manager = str(entry.get("manager") or "")
        if manager != FIELD_MANAGER and (entry.get("operation") == "Apply" or GITOPS_MANAGERS.search(manager)):
            return f"{manager} (field manager of the arguments)"
    return ""


def _share(value: object, replicas: int, rounded: Callable[[float], int]) -> int:
    """Return a number of pods, or a percentage of the replicas, as pods; 0 for what is neither."""
    if isinstance(value, int):
        return value
    found = PERCENT.fullmatch(value) if isinstance(value, str) else None
    return rounded(int(found[1]) * replicas / 100.0) if found else 0


def _print(pods: Json) -> str:
    """Return a digest of a template's spec but for the batching limits.

    Not of its metadata: a restart by `kubectl rollout restart` writes a time there, and changes nothing.
    """
    containers = [{**one, "command": None, "args": masked(words_of(one))} for one in as_objects(pods.get("containers"))]
    text = json.dumps({**pods, "containers": containers}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
