"""Field failures of what others do to a Deployment, by the ids under which they were collected. Profile P0."""

import json
from dataclasses import replace

import pytest

from autoscaler.core.memory import essential, memory_from_plain, memory_of, memory_to_plain, recall
from autoscaler.core.policy import ReplicaBounds
from autoscaler.core.state import State
from autoscaler.core.types import FIELD_MANAGER, Decision, Drain, ForeignChange, Hold, Reason, ScaleReplicas
from tests.core.world import P0, START, World, loading

TARGET = "uid-of-target"
QUOTA = "forbidden: exceeded quota: gpus"


def test_c100_a_paused_deployment_is_scaled() -> None:
    world = World(P0, 2)
    world.press(0.9, 0.9, 0.9)
    world.status = {"deployment_paused": True}
    assert world.decide().action == ScaleReplicas(seen=2, to=4, uid=TARGET)


class TestC101ProgressDeadlineExceeded:
    """A rollout that has failed stops growth, and nothing else."""

    def world(self, level: float) -> World:
        world = World(P0, 3)
        world.replicas = 4
        world.press(level, level, level)
        world.pods.append(loading("stuck", START - 5000.0))
        world.status = {"rollout": True, "rollout_unhealthy": True, "rollout_failed": True}
        return world

    def test_growth_is_held(self) -> None:
        decision = self.world(0.9).decide()
        assert isinstance(decision.action, Hold)
        assert decision.reason is Reason.ROLLOUT_UNHEALTHY
        assert "no progress" in decision.proposal.steps[-1].detail

    def test_shrinking_goes_by_the_usual_rules(self) -> None:
        world = self.world(0.1)
        world.run(21)
        assert world.writes == [(START + 300.0, 4, 3)]

    def test_growth_goes_on_when_the_condition_clears(self) -> None:
        world = self.world(0.9)
        assert isinstance(world.tick().action, Hold)
        world.status = {}
        assert world.tick().action == ScaleReplicas(seen=4, to=6, uid=TARGET)

    def test_one_that_goes_on_still_holds_a_shrink(self) -> None:
        world = self.world(0.1)
        world.status = {"rollout": True}
        assert {decision.reason for decision in world.run(40)[21:]} == {Reason.ROLLOUT}
        assert not world.writes


class TestC109SomeoneKeepsResettingReplicas:
    """Others' changes are told and waited after; who undoes ours again and again is left alone for a while."""

    def world(self) -> World:
        world = World(P0, 2)
        world.press(0.9, 0.9, 0.9)
        world.status = {"scaled_by": "helm"}
        return world

    def tick(self, world: World) -> Decision:
        """Decide and write, as the API server would note it down."""
        decision = world.tick()
        if isinstance(decision.action, ScaleReplicas):
            world.status = {"scaled_by": FIELD_MANAGER}
        return decision

    def reset(self, world: World, replicas: int = 2, by: str = "argocd-controller") -> None:
        """Let somebody else set the replicas."""
        world.scale(replicas)
        world.press(0.9, 0.9, 0.9)
        world.status = {"scaled_by": by}

    def fight(self, world: World, times: int) -> list[Decision]:
        """Return the decisions while somebody undoes so many writes, at the tick after each."""
        decisions = []
        for _ in range(times):
            while not isinstance((decision := self.tick(world)).action, ScaleReplicas):
                decisions.append(decision)
            decisions.append(decision)
            self.reset(world)
        return decisions

    def test_each_change_is_told_and_starts_the_cooldown(self) -> None:
        world = self.world()
        self.fight(world, 1)
        changed_at = world.at
        decision = self.tick(world)
        assert decision.change == ForeignChange(at=changed_at, before=4, after=2, by="argocd-controller", undid=True)
        assert decision.reason is Reason.HELD_COOLDOWN
        assert "argocd-controller changed our 4 to 2" in decision.proposal.steps[-1].detail
        decisions = [self.tick(world) for _ in range(4)]
        assert [decision.change for decision in decisions] == [None] * 4
        assert world.writes[1:] == [(changed_at + 60.0, 2, 4)]

    def test_after_the_third_it_stops_for_a_quarter_of_an_hour(self) -> None:
        world = self.world()
        self.fight(world, 3)
        stopped_at = world.at
        decisions = [self.tick(world) for _ in range(60)]
        assert {decision.reason for decision in decisions} == {Reason.WRITER_CONFLICT}
        assert len(world.writes) == 3
        (words,) = decisions[0].unblocks
        assert "3 writes of ours were undone within 600s" in words
        assert "argocd-controller changed our 4 to 2" in words
        assert "writing again in 900s" in words
        self.tick(world)
        assert world.writes[3:] == [(stopped_at + 900.0, 2, 4)]

    def test_replicas_do_not_oscillate_at_our_pace(self) -> None:
        world = self.world()
        start = world.at
        while world.at < start + 4 * 3600.0:
            if isinstance(self.tick(world).action, ScaleReplicas):
                self.reset(world)
        assert len(world.writes) <= 3 * (4 * 3600 // 900)

    def test_one_edit_by_a_person_is_the_new_base(self) -> None:
        world = self.world()
        self.tick(world)
        self.reset(world, 6, by="kubectl-edit")
        world.press(0.5, 0.5, 0.5)
        decisions = [self.tick(world) for _ in range(20)]
        assert decisions[0].change is not None
        assert decisions[0].change.by == "kubectl-edit"
        assert world.writes == [(START, 2, 4)]
        assert world.replicas == 6

    def test_neither_bounds_nor_an_emergency_pass_it(self) -> None:
        world = self.world()
        world.policy = replace(P0, replicas=ReplicaBounds(min=4, max=8))
        self.fight(world, 3)
        assert self.tick(world).reason is Reason.WRITER_CONFLICT
        assert world.replicas == 2

    def test_a_restart_forgets_nothing_of_it(self) -> None:
        world = self.world()
        self.fight(world, 2)
        self.tick(world)
        world.state = restarted(world)
        self.fight(world, 1)
        assert self.tick(world).reason is Reason.WRITER_CONFLICT
        world.state = restarted(world)
        assert self.tick(world).reason is Reason.WRITER_CONFLICT

    def test_a_dry_run_undoes_nobody(self) -> None:
        world = self.world()
        for _ in range(60):
            world.tick(apply=False)
            self.reset(world, 3 if world.replicas == 2 else 2)
        assert world.state.owners.conflict is None

    def test_after_a_pause_the_edits_under_it_hold_nothing(self) -> None:
        world = self.world()
        self.tick(world)
        self.reset(world)
        world.status |= {"paused": "autoscaler/paused is set"}
        assert self.tick(world).change is not None
        del world.status["paused"]
        assert self.tick(world).action == ScaleReplicas(seen=2, to=4, uid=TARGET)


def restarted(world: World) -> State:
    """Return what the next process knows."""
    memory = memory_of(world.policy, world.state)
    assert memory is not None
    plain = json.loads(json.dumps(memory_to_plain(essential(memory)), allow_nan=False))
    return recall(world.policy, State(), memory_from_plain(plain), world.at)


class TestQuota:
    """Pods that the API server refuses to make are not on their way, and more of them are not asked for."""

    def world(self, level: float) -> World:
        world = World(P0, 2)
        world.replicas = 4
        world.press(level, level, level)
        world.status = {"refused": QUOTA}
        return world

    def test_growth_is_held_and_says_by_what(self) -> None:
        decision = self.world(0.95).decide()
        assert decision.reason is Reason.QUOTA
        assert decision.proposal.steps[-1].detail == QUOTA
        assert any(QUOTA in line for line in decision.unblocks)

    def test_without_the_refusal_they_are_waited_for(self) -> None:
        world = self.world(0.95)
        world.status = {}
        assert world.decide().reason is Reason.PENDING_CAPACITY

    def test_what_cannot_be_had_is_cancelled(self) -> None:
        world = self.world(0.05)
        world.run(21)
        assert world.writes == [(START + 300.0, 4, 3)]

    def test_growth_goes_on_when_there_is_room(self) -> None:
        world = self.world(0.95)
        world.run(10)
        world.status = {}
        world.scale(4)
        assert world.tick().action == ScaleReplicas(seen=4, to=6, uid=TARGET)


REQUIRED = replace(P0, scale_down=replace(P0.scale_down, drain_s=300.0, require_drain=True))
SHORT, LONG = Drain(grace_s=30.0), Drain(grace_s=330.0, pre_stop_s=15.0, drain_s=300.0)


class TestC111UnsafeDrain:
    """A shrink that would cut requests is held where the policy asks for it."""

    def world(self, level: float, drain: Drain | None) -> World:
        world = World(REQUIRED, 3)
        world.press(level, level, level)
        world.status = {"drain": drain}
        return world

    @pytest.mark.parametrize(
        ("drain", "words"),
        [
            pytest.param(SHORT, "terminationGracePeriodSeconds 30 < preStop 0 + drain 300", id="too short"),
            pytest.param(None, "not known", id="unknown is not safe"),
        ],
    )
    def test_a_shrink_is_held(self, drain: Drain | None, words: str) -> None:
        world = self.world(0.05, drain)
        decision = world.run(30)[-1]
        assert not world.writes
        assert decision.reason is Reason.UNSAFE_DRAIN
        assert words in decision.proposal.steps[-1].detail

    def test_growth_is_not(self) -> None:
        assert self.world(0.9, SHORT).decide().action == ScaleReplicas(seen=3, to=5, uid=TARGET)

    def test_a_better_template_needs_no_new_window(self) -> None:
        world = self.world(0.05, SHORT)
        world.run(30)
        world.status = {"drain": LONG}
        assert world.tick().action == ScaleReplicas(seen=3, to=2, uid=TARGET)

    def test_a_policy_that_only_warns_shrinks(self) -> None:
        world = self.world(0.05, SHORT)
        world.policy = replace(REQUIRED, scale_down=replace(REQUIRED.scale_down, require_drain=False))
        world.run(21)
        assert world.writes == [(START + 300.0, 3, 2)]


@pytest.mark.parametrize(
    ("drain", "required", "lacks"),
    [
        pytest.param(LONG, 300.0, "", id="enough"),
        pytest.param(Drain(), 0.0, "", id="nothing asked for"),
        pytest.param(
            SHORT,
            300.0,
            "terminationGracePeriodSeconds 30 < preStop 0 + drain 300, --shutdown-timeout 0 < drain 300",
            id="both",
        ),
        pytest.param(
            Drain(grace_s=314.0, pre_stop_s=15.0, drain_s=300.0),
            300.0,
            "terminationGracePeriodSeconds 314 < preStop 15 + drain 300",
            id="preStop takes part of the grace period",
        ),
        pytest.param(
            Drain(grace_s=400.0, pre_stop_s=15.0, drain_s=60.0),
            300.0,
            "--shutdown-timeout 60 < drain 300",
            id="the engine gives up early",
        ),
        pytest.param(Drain(grace_s=300.0, pre_stop_s=None), 300.0, "", id="a hook that waits for the requests itself"),
        pytest.param(
            Drain(grace_s=200.0, pre_stop_s=None),
            300.0,
            "terminationGracePeriodSeconds 200 < preStop of unknown length + drain 300",
            id="a hook that has too little time",
        ),
    ],
)
def test_what_a_template_lacks(drain: Drain, required: float, lacks: str) -> None:
    assert drain.lacks(required) == lacks
