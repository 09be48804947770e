"""What is read out of an audit log."""

from typing import Any

from autoscaler.testbed.audit import Scaling, written
from autoscaler.testbed.plane import AuditEvent

US = "system:serviceaccount:demo:autoscaler"


def event(second: int, resource: str = "deployments/scale", **more: Any) -> AuditEvent:
    """Return a request of ours that was granted."""
    replicas = more.pop("replicas", None)
    given: dict[str, Any] = {
        "id": str(second),
        "at": f"2026-01-01T00:00:{second:02}.000000Z",
        "user": US,
        "credential": "JTI=a",
        "agent": "",
        "verb": "patch",
        "group": "apps",
        "resource": resource,
        "namespace": "demo",
        "name": "llama",
        "answered_at": float(second),
        "code": 200,
        "sent": None,
        "answer": None if replicas is None else {"spec": {"replicas": replicas}},
        "dry_run": False,
    }
    return AuditEvent(**{**given, **more})


def test_our_writes_in_their_order_and_by_whom() -> None:
    seen = written(
        [
            event(5, replicas=4, credential="JTI=b"),
            event(1, replicas=2),
            event(2, replicas=3),
            event(3, replicas=9, code=409),
            event(4, replicas=9, dry_run=True),
            event(6, "leases"),
            event(7, "events", verb="create"),
            event(8, "pods", verb="watch"),
            event(9, "pods", verb="list", code=403),
        ],
        US,
    )
    assert seen.scalings == (
        Scaling("2026-01-01T00:00:01.000000Z", "JTI=a", 2),
        Scaling("2026-01-01T00:00:02.000000Z", "JTI=a", 3),
        Scaling("2026-01-01T00:00:05.000000Z", "JTI=b", 4),
    )
    assert seen.hands() == [("JTI=a", 2), ("JTI=b", 1)]
    assert seen.more == {"leases": 1, "events": 1}
    assert seen.refused == 1
    assert [one.replicas for one in seen.outside(1, 3)] == [4]
    assert seen.others == ()


def test_others_who_move_the_replicas_are_named_and_who_made_the_deployment_is_not() -> None:
    seen = written(
        [
            event(1, "deployments", user="admin", verb="create"),
            event(2, "deployments", user="kubectl-user", verb="patch"),
            event(3, replicas=7, user="hpa"),
            event(4, replicas=7, user="refused", code=403),
        ],
        US,
    )
    assert seen.others == ("hpa", "kubectl-user")
    assert seen.scalings == ()
