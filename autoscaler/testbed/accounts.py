"""ServiceAccounts with exactly the rights they are given."""

import asyncio
import time
from collections.abc import Collection

from autoscaler.testbed.api import Api

Right = tuple[str, str, str]
"""API group, resource with its subresource, verb."""

LIMIT_S = 60.0
POLL_S = 0.05


async def grant(api: Api, namespace: str, account: str, rights: Collection[Right]) -> None:
    """Make an account with these rights in its namespace, and wait until it has them."""
    rules = [{"apiGroups": [group], "resources": [resource], "verbs": [verb]} for group, resource, verb in rights]
    rbac = {"apiVersion": "rbac.authorization.k8s.io/v1", "metadata": {"name": account}}
    await api.apply(
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": account}},
        {**rbac, "kind": "Role", "rules": rules},
        {
            **rbac,
            "kind": "RoleBinding",
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": account},
            "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": namespace}],
        },
        namespace=namespace,
    )
    await until_granted(api, namespace, account, rights)


async def until_granted(
    api: Api, namespace: str, account: str, rights: Collection[Right], *, allowed: bool = True
) -> None:
    """Return once an account has these rights, or none of them: the authorizer takes up roles a moment later.

    Raises TimeoutError.
    """
    user = f"system:serviceaccount:{namespace}:{account}"
    deadline = time.monotonic() + LIMIT_S
    while {await _may(api, user, namespace, right) for right in rights} != {allowed}:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{account} within {LIMIT_S:g} s not with rights {sorted(rights)} {allowed}")
        await asyncio.sleep(POLL_S)


async def _may(api: Api, user: str, namespace: str, right: Right) -> bool:
    group, resource, verb = right
    kind, _, sub = resource.partition("/")
    attributes = {"namespace": namespace, "group": group, "resource": kind, "subresource": sub, "verb": verb}
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {"user": user, "resourceAttributes": attributes},
    }
    answer = await api.request("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", review)
    return bool(answer["status"]["allowed"])
