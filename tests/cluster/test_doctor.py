"""`autoscaler doctor` as a process against a real API server: whose rights it asks for, and that it only asks."""

import asyncio
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from autoscaler.cli.doctor import needed_rights
from autoscaler.lease import RIGHTS as ELECTS
from autoscaler.testbed.api import Json
from tests.cluster.daemon import LEFT_OUT
from tests.cluster.manifests import Place, Right, autoscaler_of, deployment, grant, policy

ENTRY = (sys.executable, "-c", "from autoscaler.cli import main; main()", "doctor", "--json")
ALL = sorted(needed_rights(acting=True))


async def doctor(kubeconfig: Path, *arguments: object) -> tuple[int | None, dict[str, list[Json]]]:
    """Return its exit code, and the findings of the only policy by check."""
    process = await asyncio.create_subprocess_exec(
        *ENTRY,
        "--kubeconfig",
        str(kubeconfig),
        *map(str, arguments),
        stdout=asyncio.subprocess.PIPE,
        env={name: value for name, value in os.environ.items() if name not in LEFT_OUT},
    )
    out, _ = await process.communicate()
    (only,) = json.loads(out)["policies"]
    found: dict[str, list[Json]] = {}
    for finding in only["findings"]:
        found.setdefault(finding["check"], []).append(finding)
    return process.returncode, found


def levels(found: dict[str, list[Json]], check: str) -> set[str]:
    return {finding["level"] for finding in found[check]}


async def account(place: Place, folder: Path, rights: Iterable[Right]) -> Path:
    """Return the kubeconfig of an account with these rights."""
    await grant(place, rights)
    token = await place.plane.token_for(place.namespace, "subject")
    return place.plane.kubeconfig_for(token, folder / "account.kubeconfig")


async def test_a_healthy_target_has_no_problem_and_nothing_is_written(place: Place, tmp_path: Path) -> None:
    await place.create(deployment(replicas=2))
    await place.until_ready(2)
    kubeconfig = await account(place, tmp_path, ALL)
    code, found = await doctor(kubeconfig, policy(tmp_path, place.plane, place.namespace, replicas="{min: 1, max: 4}"))
    assert code == 0
    for check in ("rights", "target", "owners", "batching", "engines", "model", "decision"):
        assert levels(found, check) == {"ok"}, found[check]
    assert found["batching"][0]["text"] == "--max-num-seqs 64"
    assert found["engines"][0]["text"] == "2 of 2 pods give engine metrics"
    assert "num_requests_running (vllm:num_requests_running)" in found["signals"][0]["text"]
    assert "--shutdown-timeout is 0" in found["drain"][0]["text"]
    assert levels(found, "room") == {"unknown"}
    assert found["decision"][0]["text"].startswith("hold: ")
    user = f"system:serviceaccount:{place.namespace}:subject"
    asked = {event.right for event in await place.plane.audit() if event.user == user}
    review = ("authorization.k8s.io", "selfsubjectaccessreviews", "create")
    assert {right for right in asked if right[2] not in ("get", "list", "watch")} == {review}


async def test_who_may_list_nodes_is_told_of_the_room(place: Place, tmp_path: Path) -> None:
    await place.create(deployment(replicas=1, gpus=8))
    rules = policy(tmp_path, place.plane, place.namespace, replicas="{min: 1, max: 100}")
    _, found = await doctor(place.plane.kubeconfig, rules)
    (room,) = found["room"]
    assert room["level"] == "warning"
    assert "nvidia.com/gpu on " in room["text"]
    assert room["text"].endswith("replicas.max is 100")


@pytest.mark.parametrize(
    "right",
    [right for right in ALL if right[1] in ("pods", "deployments/scale", "events")],
    ids=lambda right: "-".join(right[1:]),
)
async def test_a_right_that_is_missing_is_named(place: Place, tmp_path: Path, right: Right) -> None:
    await place.create(deployment(replicas=1))
    kubeconfig = await account(place, tmp_path, [one for one in ALL if one != right])
    code, found = await doctor(kubeconfig, policy(tmp_path, place.plane, place.namespace))
    (finding,) = found["rights"]
    assert finding["text"].startswith(f"not granted in {place.namespace}: {right[2]} {right[1]}")
    assert (code, finding["level"]) == ((0, "warning") if right[1] == "events" else (1, "problem"))


@pytest.mark.parametrize("missing", [None, *sorted(ELECTS)], ids=lambda right: right[2] if right else "none")
async def test_the_rights_to_a_lease_are_asked_for_where_it_is(
    place: Place, tmp_path: Path, missing: Right | None
) -> None:
    await place.create(deployment(replicas=1))
    kubeconfig = await account(place, tmp_path, [*ALL, *(ELECTS - {missing})])
    rules = policy(tmp_path, place.plane, place.namespace)
    code, found = await doctor(kubeconfig, rules, "--lease", f"{place.namespace}/autoscaler")
    (finding,) = found["lease"]
    if missing is None:
        assert (code, finding["level"]) == (0, "ok")
    else:
        assert (code, finding["level"]) == (1, "problem")
        assert finding["text"].startswith(f"not granted in {place.namespace}: {missing[2]} leases")
    _, elsewhere = await doctor(kubeconfig, rules, "--lease", "default/autoscaler")
    assert elsewhere["lease"][0]["text"].startswith("not granted in default: create, get, patch leases")


async def test_a_real_autoscaler_on_the_target_is_a_problem(place: Place, tmp_path: Path) -> None:
    await place.create(deployment(replicas=1))
    await place.apply(autoscaler_of("chat"))
    code, found = await doctor(place.plane.kubeconfig, policy(tmp_path, place.plane, place.namespace))
    assert (code, levels(found, "owners")) == (1, {"problem"})
    assert "HorizontalPodAutoscaler/chat" in found["owners"][0]["text"]
