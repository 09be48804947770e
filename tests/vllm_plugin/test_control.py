"""The hook on a fake of vLLM's scheduler that dies as the real one does."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoscaler.vllm_plugin.files import FOLDER_VARIABLE
from autoscaler.vllm_plugin.hook import UTILITY, wrap
from autoscaler.vllm_plugin.limits import PREFILL, SEQS, TOKENS
from tests.vllm_plugin.fake_scheduler import Era, FakeConfig, FakeCore, FakeScheduler, hooked

ERAS: tuple[Era, ...] = ("equal", "clamp", "cap")


def ask(core: FakeCore, generation: int = 0, **limits: int) -> dict[str, Any]:
    """Return the state, after a PUT where a generation is given."""
    body = json.dumps({"generation": generation, "limits": limits}) if generation else ""
    content: dict[str, Any] = json.loads(core.call(UTILITY, body))
    state: dict[str, Any] = content.get("state") or content["error"]
    return state


def fill(scheduler: FakeScheduler, count: int) -> None:
    scheduler.waiting += range(count)
    scheduler.schedule()


@pytest.mark.parametrize("era", ERAS)
def test_a_lower_cap_drains_and_a_higher_one_admits(era: Era) -> None:
    scheduler, core = hooked(era)
    fill(scheduler, 40)
    assert len(scheduler.running) == 16
    state = ask(core, 1, max_num_seqs=3)
    assert (state["generation"], state["applied_generation"]) == (1, 1)
    assert state["effective"][SEQS] == (3 if era == "cap" else 16)
    for left in range(15, 2, -1):
        scheduler.running.pop()
        scheduler.schedule()
        assert len(scheduler.running) == left
    scheduler.running.pop()
    scheduler.schedule()
    assert (len(scheduler.running), ask(core)["effective"][SEQS]) == (3, 3)
    ask(core, 2, max_num_seqs=16)
    scheduler.schedule()
    assert len(scheduler.running) == 16


@pytest.mark.parametrize("era", ERAS)
def test_the_naive_change_kills_the_fake_as_it_kills_the_engine(era: Era) -> None:
    scheduler = FakeScheduler(era)
    fill(scheduler, 16)
    scheduler.max_num_running_reqs = 3
    with pytest.raises(AssertionError):
        scheduler.schedule()


@pytest.mark.parametrize("era", ERAS)
def test_the_budget_never_starves_what_runs(era: Era) -> None:
    scheduler, core = hooked(era, spec=2)
    fill(scheduler, 10)
    assert ask(core, 1, max_num_batched_tokens=4)["effective"][TOKENS] == 10 * 3
    assert len(scheduler.schedule().tokens) == 10
    scheduler.running = scheduler.running[:1]
    scheduler.schedule()
    assert ask(core)["effective"][TOKENS] == 4


def test_the_threshold_is_in_the_configuration() -> None:
    scheduler, core = hooked()
    assert ask(core, 1, long_prefill_token_threshold=128)["effective"][PREFILL] == 128
    assert scheduler.scheduler_config.long_prefill_token_threshold == 128
    ask(core, 2)
    assert scheduler.scheduler_config.long_prefill_token_threshold == 0


Event = tuple[str, int]
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 20)),
        st.tuples(st.just("finish"), st.integers(1, 16)),
        st.tuples(st.just("preempt"), st.integers(1, 16)),
        st.tuples(st.just("seqs"), st.integers(-2, 20)),
        st.tuples(st.just("tokens"), st.integers(-2, 600)),
        st.tuples(st.just("release"), st.just(0)),
    ),
    max_size=60,
)


@settings(deadline=None)
@given(era=st.sampled_from(ERAS), spec=st.integers(0, 3), events=EVENTS)
def test_whatever_is_asked_the_engine_lives_and_nobody_starves(era: Era, spec: int, events: list[Event]) -> None:
    scheduler, core = hooked(era, spec=spec)
    for generation, (what, count) in enumerate(events, 1):
        if what == "add":
            scheduler.waiting += [generation * 100 + number for number in range(count)]
        elif what == "finish":
            del scheduler.running[:count]
        elif what == "preempt":
            scheduler.waiting[:0] = scheduler.running[-count:]
            del scheduler.running[-count:]
        else:
            name = {"seqs": SEQS, "tokens": TOKENS}.get(what)
            ask(core, generation, **({name: count} if name else {}))
        before = len(scheduler.running)
        output = scheduler.schedule()
        assert set(output.tokens) == set(scheduler.running)
        state = ask(core)
        assert state["status"] == "active"
        assert all(1 <= state["effective"][name] <= state["ceilings"][name] for name in (SEQS, TOKENS))
        assert len(scheduler.running) <= max(before, state["targets"].get(SEQS, 16))


@pytest.mark.parametrize(
    ("limits", "status", "code"),
    [
        pytest.param({SEQS: 99}, 422, "refused", id="above"),
        pytest.param({SEQS: 0}, 422, "refused", id="zero"),
        pytest.param({"max_num_seq": 1}, 400, "bad_request", id="misspelt"),
    ],
)
def test_what_is_refused_moves_nothing(limits: dict[str, int], status: int, code: str) -> None:
    scheduler, core = hooked()
    ask(core, 4, max_num_seqs=5)
    error = ask(core, 5, **limits)
    assert (error["status"], error["code"]) == (status, code)
    scheduler.schedule()
    state = ask(core)
    assert (state["generation"], state["effective"][SEQS]) == (4, 5)


def test_a_generation_that_is_behind_is_told_which_is_in_force() -> None:
    _, core = hooked()
    ask(core, 4, max_num_seqs=5)
    error = ask(core, 3, max_num_seqs=6)
    assert (error["status"], error["code"], error["generation"]) == (409, "stale_generation", 4)
    assert ask(core, 4, max_num_seqs=5)["generation"] == 4


def test_the_start_up_cap_may_be_below_the_places_that_the_engine_has() -> None:
    _, core = hooked("cap", FakeConfig(max_num_active_seqs=4))
    state = ask(core, 1, max_num_seqs=16)
    assert (state["startup"][SEQS], state["ceilings"][SEQS], state["effective"][SEQS]) == (4, 16, 16)
    assert ask(core, 2)["effective"][SEQS] == 4


@pytest.mark.parametrize(
    ("config", "limits"),
    [
        pytest.param(FakeConfig(enable_chunked_prefill=False), [SEQS], id="chunked-prefill-off"),
        pytest.param(FakeConfig(disable_chunked_mm_input=True), [SEQS], id="images-whole"),
        pytest.param(FakeConfig(), [SEQS, TOKENS, PREFILL], id="all"),
    ],
)
def test_what_would_leave_a_prompt_waiting_for_ever_cannot_be_moved(config: FakeConfig, limits: list[str]) -> None:
    _, core = hooked(config=config)
    assert ask(core)["capabilities"] == limits
    error = ask(core, 1, max_num_batched_tokens=64)
    assert error.get("code") == (None if TOKENS in limits else "refused")


def test_a_model_with_state_space_layers_keeps_room_for_a_block() -> None:
    scheduler, core = hooked()
    scheduler.need_mamba_block_aligned_split = True  # type: ignore[attr-defined]
    scheduler.block_size = 256  # type: ignore[attr-defined]
    state = ask(core)
    assert (state["floors"][TOKENS], state["capabilities"]) == (256, [SEQS, TOKENS])


class Stubborn(FakeConfig):
    """A configuration that takes no write."""

    def __setattr__(self, name: str, value: object) -> None:
        if name in self.__dict__:
            raise TypeError("frozen")
        super().__setattr__(name, value)


class Hostile(FakeScheduler):
    """A scheduler whose queue cannot even be looked at."""

    @property
    def num_spec_tokens(self) -> int:
        """Raise what nobody expects."""
        raise RuntimeError("not now")

    @num_spec_tokens.setter
    def num_spec_tokens(self, value: int) -> None:
        pass


class Own(FakeScheduler):
    """A scheduler that schedules in its own way."""

    def schedule(self) -> Any:
        """Do as the other does."""
        return super().schedule()


def without(name: str) -> FakeScheduler:
    scheduler, _ = hooked()
    delattr(scheduler, name)
    return scheduler


def having(name: str, value: object) -> FakeScheduler:
    scheduler, _ = hooked()
    setattr(scheduler, name, value)
    return scheduler


def of_class(base: type[FakeScheduler]) -> FakeScheduler:
    scheduler, core = type("Scheduler", (FakeScheduler,), {}), type("Core", (FakeCore,), {})
    wrap(scheduler, core, vllm="0", plugin="0")
    one = type("Other", (base, scheduler), {})()
    assert isinstance(one, FakeScheduler)
    return one


@pytest.mark.parametrize(
    ("scheduler", "code"),
    [
        pytest.param(without("max_num_scheduled_tokens"), "missing_attribute", id="missing"),
        pytest.param(without("running"), "missing_attribute", id="no-running"),
        pytest.param(having("max_num_running_reqs", 7), "unexpected_value", id="not-the-configured-cap"),
        pytest.param(having("max_num_scheduled_tokens", 512.0), "unexpected_value", id="no-integer"),
        pytest.param(having("waiting", None), "unexpected_value", id="no-queue"),
        pytest.param(hooked(config=Stubborn())[0], "not_writable", id="frozen"),
        pytest.param(of_class(Own), "other_scheduler", id="own-schedule"),
    ],
)
def test_what_differs_leaves_the_plugin_passive_and_told(scheduler: FakeScheduler, code: str) -> None:
    cls = type("Core", (FakeCore,), {})
    wrap(type("Scheduler", (FakeScheduler,), {}), cls, vllm="0", plugin="0")
    core = cls(scheduler)
    state = ask(core)
    assert (state["status"], state["reason"]["code"], state["capabilities"]) == ("passive", code, [])
    assert state["reason"]["message"]
    assert ask(core, 1, max_num_seqs=3)["code"] == "passive"


def test_a_scheduler_that_raises_when_looked_at_is_left_alone() -> None:
    scheduler, core = type("Scheduler", (Hostile,), {}), type("Core", (FakeCore,), {})
    wrap(scheduler, core, vllm="0", plugin="0")
    assert ask(core(scheduler()))["reason"] == {
        "code": "hook_failed",
        "message": "the scheduler cannot be examined: RuntimeError('not now')",
    }


@pytest.mark.parametrize("era", ERAS)
def test_another_hand_on_a_limit_is_yielded_to(era: Era) -> None:
    scheduler, core = hooked(era)
    ask(core, 1, max_num_seqs=3, max_num_batched_tokens=64)
    scheduler.max_num_scheduled_tokens = 100
    scheduler.schedule()
    state = ask(core)
    assert (state["status"], state["reason"]["code"]) == ("passive", "changed_by_another")
    assert state["effective"] == {SEQS: 16, TOKENS: 100, PREFILL: 0}
    assert (state["generation"], state["applied_generation"]) == (1, 0)


def test_a_hook_that_fails_leaves_a_step_that_takes_place() -> None:
    scheduler, core = hooked("clamp")
    fill(scheduler, 8)
    ask(core, 1, max_num_seqs=3)
    scheduler.num_waiting_for_streaming_input = None  # type: ignore[attr-defined]
    assert len(scheduler.schedule().tokens) == 8
    state = ask(core)
    assert (state["status"], state["reason"]["code"], state["effective"][SEQS]) == ("passive", "hook_failed", 16)


class Bare:
    """A scheduler to which nothing can be attached."""

    __slots__ = ()

    def schedule(self) -> str:
        """Return that a step took place."""
        return "a step"


def test_a_scheduler_to_which_nothing_can_be_attached_makes_its_steps(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)  # the level that another test left is not ours
    scheduler: Any = type("Scheduler", (Bare,), {"__slots__": ()})
    core = type("Core", (FakeCore,), {})
    wrap(scheduler, core, vllm="0", plugin="0")
    one = scheduler()
    assert [one.schedule(), one.schedule()] == ["a step"] * 2
    assert len([record for record in caplog.records if "the limits are not moved" in record.message]) == 1


def test_wrapped_twice_is_wrapped_once() -> None:
    scheduler: Any = type("Scheduler", (FakeScheduler,), {})
    core = type("Core", (FakeCore,), {})
    wrap(scheduler, core, vllm="0", plugin="0")
    once = scheduler.schedule
    wrap(scheduler, core, vllm="0", plugin="0")
    assert scheduler.schedule is once


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the pod's folder, named by the environment."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    return tmp_path


def write(folder: Path, text: str) -> None:
    part = folder / "part"
    part.write_text(text)
    part.replace(folder / "target.json")


def test_a_restarted_engine_has_its_values_before_its_first_step(folder: Path) -> None:
    _, core = hooked()
    assert ask(core, 7, max_num_seqs=3)["persistent"] is True
    again, core = hooked()
    fill(again, 10)
    assert len(again.running) == 3
    state = ask(core)
    assert (state["generation"], state["applied_generation"], state["targets"]) == (7, 7, {SEQS: 3})
    shown = json.loads((folder / "state-0.json").read_text())
    assert (shown["applied_generation"], shown["vllm"]) == (7, "0.0.fake")


def test_a_restart_with_smaller_ceilings_refuses_the_old_values(folder: Path) -> None:
    _, core = hooked()
    ask(core, 7, max_num_seqs=12)
    _, core = hooked(config=FakeConfig(max_num_seqs=8))
    state = ask(core)
    assert (state["generation"], state["effective"][SEQS]) == (0, 8)
    assert [problem["code"] for problem in state["refused"]["problems"]] == ["above_ceiling"]
    assert ask(core, 8, max_num_seqs=4)["refused"] is None


def test_a_file_is_as_good_as_a_put(folder: Path) -> None:
    scheduler, core = hooked()
    write(folder, '{"generation": 2, "limits": {"max_num_seqs": 5}}')
    assert ask(core)["effective"][SEQS] == 5
    assert ask(core, 1, max_num_seqs=6)["code"] == "stale_generation"
    fill(scheduler, 10)
    assert len(scheduler.running) == 5


@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param("{", "not JSON", id="half"),
        pytest.param('{"generation": 1, "limits": {"max_num_seqs": 2}}', "behind", id="behind"),
        pytest.param(" " * 5000, "over 4096 bytes", id="long"),
        pytest.param('{"generation": 9, "limits": {"max_num_seqs": 99}}', "above its ceiling 16", id="refused"),
    ],
)
def test_a_bad_file_moves_nothing_and_is_told(folder: Path, text: str, words: str) -> None:
    _, core = hooked()
    ask(core, 3, max_num_seqs=4)
    write(folder, text)
    state = ask(core)
    assert (state["generation"], state["effective"][SEQS]) == (3, 4)
    assert words in state["refused"]["message"]
    assert ask(core, 10, max_num_seqs=5)["refused"] is None


def test_a_folder_that_takes_no_write_costs_only_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "gone"))
    _, core = hooked()
    state = ask(core, 1, max_num_seqs=4)
    assert (state["persistent"], state["applied_generation"]) == (False, 1)
    assert not list(tmp_path.iterdir())
