"""What the API server says that we may do. A review is answered, not kept; everybody may ask for one."""

import asyncio
from collections.abc import Iterable, Mapping

from autoscaler.doctor import Right
from autoscaler.errors import TargetError
from autoscaler.sources.kubernetes_api import KubernetesApi
from autoscaler.telemetry import redact

REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"


async def review(api: KubernetesApi, namespace: str, rights: Iterable[Right]) -> Mapping[Right, bool | str]:
    """Return whether each right is granted, or why that cannot be told."""
    rights = sorted(rights)
    answers = await asyncio.gather(*(_may(api, namespace, right) for right in rights))
    return dict(zip(rights, answers, strict=True))


async def _may(api: KubernetesApi, namespace: str, right: Right) -> bool | str:
    group, resource, verb = right
    kind, _, sub = resource.partition("/")
    asked = {"namespace": namespace, "group": group, "resource": kind, "subresource": sub, "verb": verb}
    body = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": asked},
    }
    try:
        answer = await api.request("POST", REVIEWS, body=body)
    except TargetError as error:
        return redact(str(error))
    status = answer.get("status")
    return isinstance(status, dict) and status.get("allowed") is True
