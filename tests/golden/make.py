"""Makes the golden recordings: `python -m tests.golden.make`.

Seeded: the same program makes the same recordings, but for the port in the details of gaps.
"""

import asyncio
from dataclasses import replace
from pathlib import Path

from autoscaler.core.policy import Policy, ReplicaBounds, TargetRef
from autoscaler.policy_file import load_policies, shipped_policies
from autoscaler.sim.workload import MINUTE, Surge, spike
from tests.recording import TARGET, chat_fleet, record

HERE = Path(__file__).parent
P0 = HERE.parent / "data" / "policies" / "p0.yaml"
REF = TargetRef(namespace=TARGET.namespace, deployment=TARGET.deployment)


async def rush(path: Path) -> None:
    """Record the default law through a rush."""
    traffic = spike(3.0, Surge(at=10 * MINUTE, duration_s=8 * MINUTE, factor=4.0, ramp_s=2 * MINUTE))
    policy = Policy(name="chat", target=REF, replicas=ReplicaBounds(min=1, max=6), interval_s=15.0)
    await record(path, chat_fleet(traffic, 36 * MINUTE), {"chat": policy}, 36 * MINUTE)


async def changes(path: Path) -> None:
    """Record two policies, an outage of the pages, and a changed policy."""
    traffic = spike(2.0, Surge(at=8 * MINUTE, duration_s=6 * MINUTE, factor=5.0, ramp_s=MINUTE))
    p0 = replace(load_policies([P0]).policies["p0"], target=REF, replicas=ReplicaBounds(min=1, max=3))
    seed = load_policies([shipped_policies() / "seed-scale-score.yaml"]).policies["seed-scale-score"]
    seed = replace(seed, name="seed", target=REF, replicas=ReplicaBounds(min=1, max=4), interval_s=30.0, dry_run=True)
    await record(
        path,
        chat_fleet(traffic, 30 * MINUTE, replicas=1, seed=2),
        {"p0": p0, "seed": seed},
        30 * MINUTE,
        changes=[(15 * MINUTE, {"p0": replace(p0, replicas=ReplicaBounds(min=2, max=4)), "seed": seed})],
        fails=lambda elapsed: "unreachable" if 5 * MINUTE <= elapsed < 7 * MINUTE else "",
    )


def main() -> None:
    """Make all of them, and say how large they are."""
    for make in (rush, changes):
        path = HERE / f"{make.__name__}.trace.gz"
        path.unlink(missing_ok=True)
        asyncio.run(make(path))
        print(f"{path.name}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
