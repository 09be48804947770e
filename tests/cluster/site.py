"""A namespace in which the daemon has an account, and the rights that deploy/ gives it."""

from pathlib import Path
from typing import NamedTuple

import yaml

from autoscaler.testbed.plane import AuditEvent
from tests.cluster.manifests import Place, Right

ROOT = Path(__file__).parents[2]
BASE, LIVE = str(ROOT / "deploy/base"), str(ROOT / "deploy/overlays/live")
GENTLE, ROLLOUT = str(ROOT / "deploy/components/gentle"), str(ROOT / "deploy/components/rollout")
SCALE_WRITE = ("apps", "deployments/scale", "patch")


def granted(*folders: str) -> frozenset[Right]:
    """Return what the folders' Roles grant."""
    roles = [role for folder in folders for role in yaml.safe_load_all((Path(folder) / "role.yaml").read_text())]
    rules = [rule for role in roles for rule in role.get("rules", ())]
    return frozenset(
        (group, resource, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    )


DEPLOYED = granted(BASE, LIVE)
"""What the daemon may do where deploy/overlays/live is applied; every daemon of these tests may do that and no more."""


class Site(NamedTuple):
    """A namespace in which the daemon has an account."""

    place: Place
    kubeconfig: Path
    user: str

    async def requests(self) -> list[AuditEvent]:
        """Return what the account asked of the API server so far, reviews of its rights left out: all may ask those."""
        mine = [event for event in await self.place.plane.audit() if event.user == self.user]
        return [event for event in mine if event.resource != "selfsubjectaccessreviews"]

    async def scalings(self) -> list[AuditEvent]:
        """Return what it changed, but for Events about it."""
        return [event for event in await self.requests() if event.wrote and event.resource != "events"]


async def site_of(place: Place, account: str, folder: Path) -> Site:
    """Return the namespace with a kubeconfig of that account."""
    token = await place.plane.token_for(place.namespace, account)
    user = f"system:serviceaccount:{place.namespace}:{account}"
    return Site(place, place.plane.kubeconfig_for(token, folder / "account.kubeconfig"), user)
