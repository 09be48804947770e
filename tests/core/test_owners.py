"""Who else writes the replicas: what counts as foreign, when we stand down, and what two memories make together."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscaler.core.owners import Owners, merged, standing_down_s, watch_owners, wrote
from autoscaler.core.policy import OwnersPolicy
from autoscaler.core.types import FIELD_MANAGER, ForeignChange, TargetStatus
from tests.core.world import START

RULE = OwnersPolicy()
HUMAN, GITOPS = "kubectl", "argocd-controller"


def target(replicas: int, by: str = GITOPS, **fields: object) -> TargetStatus:
    values: dict[str, object] = {"namespace": "serving", "name": "chat", "uid": "u-1", "scaled_by": by}
    return TargetStatus(current_replicas=replicas, **{**values, **fields})  # type: ignore[arg-type]


def seen(*looks: TargetStatus, policy: OwnersPolicy = RULE) -> Owners:
    """Return what is remembered after looks ten seconds apart."""
    owners = Owners()
    for number, look in enumerate(looks):
        owners = watch_owners(policy, owners, look, START + 10.0 * number)
    return owners


@pytest.mark.parametrize(
    ("looks", "undid"),
    [
        pytest.param([target(2)], None, id="what was there before we came"),
        pytest.param([target(2), target(2)], None, id="nothing happened"),
        pytest.param([target(2), target(5)], False, id="another value"),
        pytest.param([target(5, FIELD_MANAGER), target(2)], True, id="of a value that was ours"),
        pytest.param([target(5, FIELD_MANAGER), target(2), target(3)], False, id="of a value that was another's"),
        pytest.param([target(2), target(5, FIELD_MANAGER)], None, id="by us: a lost answer, or the last leader"),
        pytest.param([target(2), target(2, HUMAN)], None, id="written anew, the same value"),
        pytest.param([target(2, ""), target(5, "")], None, id="by nobody knows whom"),
        pytest.param([target(2), target(5, uid="u-2")], None, id="of another Deployment of that name"),
    ],
)
def test_what_counts_as_a_foreign_change(looks: list[TargetStatus], undid: bool | None) -> None:
    change = seen(*looks).change
    assert (None if change is None else change.undid) == undid


def test_a_change_says_who_and_when() -> None:
    change = seen(target(5, FIELD_MANAGER), target(2, HUMAN, scaled_at=START + 4.0)).change
    assert change == ForeignChange(at=START + 10.0, before=5, after=2, by=HUMAN, written_at=START + 4.0, undid=True)
    assert str(change) == "kubectl changed our 5 to 2"
    assert str(replace(change, undid=False)) == "kubectl changed 5 to 2"


def test_our_own_write_is_expected_whoever_wrote_before() -> None:
    owners = wrote(seen(target(2)), 5, START)
    assert watch_owners(RULE, owners, target(5, FIELD_MANAGER), START + 10.0).change is None
    undone = watch_owners(RULE, owners, target(2), START + 10.0).change
    assert undone is not None
    assert (undone.before, undone.after, undone.undid) == (5, 2, True)


def test_nothing_new_is_the_same_object() -> None:
    owners = seen(target(2))
    assert watch_owners(RULE, owners, target(2), START + 60.0) is owners


def undone(times: list[float], policy: OwnersPolicy = RULE) -> Owners:
    """Return what is remembered when writes of ours were undone at these times."""
    owners = seen(target(2), policy=policy)
    for at in times:
        owners = watch_owners(policy, wrote(owners, 5, START + at), target(2), START + at)
    return owners


@pytest.mark.parametrize(
    ("times", "stands"),
    [
        pytest.param([0.0, 60.0], False, id="twice"),
        pytest.param([0.0, 60.0, 120.0], True, id="three times"),
        pytest.param([0.0, 60.0, 600.0], False, id="three times in more than the window"),
        pytest.param([0.0, 60.0, 600.0, 630.0], True, id="three times in a later window"),
    ],
)
def test_c109_we_stand_down_after_so_many_reversions(times: list[float], stands: bool) -> None:
    owners, last = undone(times), START + times[-1]
    assert (standing_down_s(RULE, owners, last) == 900.0) is stands
    assert standing_down_s(RULE, owners, last + 900.0) == 0.0
    assert (owners.conflict is not None) is stands
    assert owners.conflict is None or owners.conflict.by == GITOPS


def test_after_it_three_more_are_needed() -> None:
    owners = undone([0.0, 60.0, 120.0, 1100.0, 1150.0])
    assert standing_down_s(RULE, owners, START + 1150.0) == 0.0
    assert undone([0.0, 60.0, 120.0, 1100.0, 1150.0, 1200.0]).conflict != owners.conflict


def test_no_time_to_stand_down_switches_it_off() -> None:
    off = replace(RULE, stand_down_s=0.0)
    assert standing_down_s(off, undone([0.0, 1.0, 2.0], off), START + 2.0) == 0.0


@given(
    steps=st.lists(st.tuples(st.floats(1.0, 400.0), st.booleans()), max_size=60),
    reversions=st.integers(1, 4),
    window_s=st.sampled_from([60.0, 600.0]),
    extra_s=st.sampled_from([0.0, 300.0]),
)
def test_whatever_others_do_they_undo_us_no_more_often_than_that(
    steps: list[tuple[float, bool]], reversions: int, window_s: float, extra_s: float
) -> None:
    policy = OwnersPolicy(reversions=reversions, window_s=window_s, stand_down_s=window_s + extra_s)
    owners, at, replicas = seen(target(2), policy=policy), START, 2
    undone_at: list[float] = []
    for pause_s, foreign in steps:
        at += pause_s
        if standing_down_s(policy, owners, at) == 0.0:
            owners, replicas = wrote(owners, replicas + 1, at), replicas + 1
            undone_at += [at] if foreign else []
        replicas -= foreign
        owners = watch_owners(policy, owners, target(replicas, GITOPS if foreign else ""), at)
    for first in undone_at:
        assert sum(first <= when < first + window_s for when in undone_at) <= reversions


# --- two memories ---------------------------------------------------------------------------------------------------

CHANGE = ForeignChange(at=START, before=5, after=2, by=GITOPS, undid=True)
KEPT = Owners(uid="u-1", replicas=2, ours=True, change=CHANGE, undone_at=(START - 60.0, START))


@pytest.mark.parametrize(
    ("own", "kept", "result"),
    [
        pytest.param(Owners(), KEPT, KEPT, id="before the first look all of it counts"),
        pytest.param(KEPT, Owners(), KEPT, id="nothing was kept"),
        pytest.param(KEPT, KEPT, KEPT, id="twice"),
        pytest.param(replace(KEPT, uid="u-2"), KEPT, replace(KEPT, uid="u-2"), id="another Deployment"),
        pytest.param(
            Owners(uid="u-1", replicas=7, change=replace(CHANGE, at=START + 3.0), undone_at=(START + 1.0,)),
            KEPT,
            Owners(uid="u-1", replicas=7, change=replace(CHANGE, at=START + 3.0), undone_at=KEPT.undone_at),
            id="the same changes, seen a moment later",
        ),
        pytest.param(
            replace(KEPT, undone_at=()),
            replace(KEPT, undone_at=(), conflict=CHANGE),
            replace(KEPT, undone_at=(), conflict=CHANGE),
            id="a conflict that only the other noticed",
        ),
        pytest.param(
            replace(KEPT, undone_at=(), conflict=CHANGE),
            KEPT,
            replace(KEPT, undone_at=(), conflict=CHANGE),
            id="what led to a conflict does not count again",
        ),
        pytest.param(
            Owners(),
            replace(KEPT, change=replace(CHANGE, at=START + 999.0), undone_at=(START + 999.0,)),
            replace(KEPT, change=replace(CHANGE, at=START + 10.0), undone_at=(START + 10.0,)),
            id="in the future",
        ),
    ],
)
def test_merged(own: Owners, kept: Owners, result: Owners) -> None:
    once = merged(own, kept, START + 10.0)
    assert once == result
    assert merged(once, kept, START + 10.0) == once


def test_an_edit_while_no_daemon_ran_is_noticed() -> None:
    taken_in = merged(Owners(), seen(target(5, FIELD_MANAGER)), START + 300.0)
    change = watch_owners(RULE, taken_in, target(2, HUMAN), START + 300.0).change
    assert change is not None
    assert (change.by, change.undid) == (HUMAN, True)
