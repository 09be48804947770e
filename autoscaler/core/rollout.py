"""Batching limits without a plugin: changed in the pod template, by rolling restarts that are few, watched and undone.

What `core.batching` would move live is written into the arguments of the engine's container instead. A restart takes
minutes and a spare card: so one only after the same has held the engines back for minutes, a few a day, never on top of
another change, and back as soon as the new pods do not start or serve worse.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from autoscaler.core.batching import (
    LOWERING,
    MIN_SHARE_OF_WINDOW,
    Fleet,
    Scene,
    choose,
    is_blacklisted,
    judge,
    leave_in_motion,
    measure,
    relieve,
    scene_of,
    tune,
    unstartable,
)
from autoscaler.core.facts import BROKEN_STATES, is_serving
from autoscaler.core.guards import Tick
from autoscaler.core.kv import BLOCK_TOKENS, KvLayout
from autoscaler.core.note import FAILED_KEPT, Failed, Note, Phase, is_open, read_note, stands, write_note
from autoscaler.core.policy import BatchingMode, LimitBounds, RolloutPolicy
from autoscaler.core.tuning import DAY_S, Reverted, Trial, moved_value
from autoscaler.core.types import (
    Batching,
    BatchReason,
    Limits,
    Measured,
    Pod,
    PodLimits,
    Proposal,
    RollOut,
    Standing,
    TargetStatus,
    Template,
)

RETRY_S = 60.0
"""After a write that failed."""
MOST_TOKENS = 16384
"""The largest `max_num_batched_tokens` that vLLM itself starts with; no policy's bound is needed up to there."""
LEAST_TOKENS = 2048
"""The smallest that vLLM starts with where the arguments do not say any."""
LARGEST = 2**31 - 1
CROWDED = 2
"""Requests, in multiples of those that the KV cache holds at full length, above which more sequences are pointless: on
average a request that runs holds at least half of its length.
"""


def move_limits(tick: Tick, proposal: Proposal) -> Batching | None:
    """Return what to make of the batching limits, by the plugin or in the pod template; None where they stay alone."""
    settings = tick.policy.batching
    if settings.mode is BatchingMode.ROLLOUT:
        return roll(tick, proposal)
    found = tune(tick, proposal)
    if found is None or found.reason is not BatchReason.NO_PLUGIN or not settings.rolls_out:
        return found
    template = tick.snapshot.target.template
    # What we have begun is seen through, whether or not a pod is left that could say so.
    begun = template is not None and is_open(template)
    return roll(tick, proposal) if begun or nobody_has_a_plugin(tick) else found


def nobody_has_a_plugin(tick: Tick) -> bool:
    """Tell whether every serving pod has said that no plugin in it moves limits. One without an answer says nothing."""
    said = {one.pod_uid: one for one in tick.snapshot.limits}
    serving = [pod for pod in tick.snapshot.target.pods if is_serving(pod)]
    return bool(serving) and all((one := said.get(pod.uid)) is not None and one.lacking for pod in serving)


# --- the template's limits as a fleet -------------------------------------------------------------------------------


def fleet_of(tick: Tick, template: Template) -> Fleet:
    """Return the limits of the template, and between what they are moved. Nobody is told anything."""
    settings, said = tick.policy.batching, template.limits
    ceiling = Limits(
        max_num_seqs=_highest(said.max_num_seqs, settings.sequences, crowd(tick)),
        max_num_batched_tokens=_highest(said.max_num_batched_tokens, settings.tokens, MOST_TOKENS),
    )
    low = Limits(
        max_num_seqs=_lowest(ceiling.max_num_seqs, settings.sequences),
        max_num_batched_tokens=_lowest(ceiling.max_num_batched_tokens, settings.tokens),
    )
    return Fleet(pods=(), limits=said, low=low, ceiling=ceiling, left_alone=())


def _highest(said: int | None, bounds: LimitBounds, most: int | None) -> int | None:
    """Return the largest value that a limit is moved to, and never less than it is."""
    if said is None:
        return None
    return max(said, min(value for value in (bounds.max, most, LARGEST) if value is not None))


def _lowest(ceiling: int | None, bounds: LimitBounds) -> int | None:
    return None if ceiling is None else min(ceiling, bounds.min)


def crowd(tick: Tick) -> int | None:
    """Return the sequences of one engine above which more only wait for blocks of the KV cache; None where unknown.

    By the engines' own tokens and the requests of the policy's window, in whole blocks. Worked: 20 480 tokens,
    requests of 964: 1279 blocks of 16, 61 a request, 20 at full length, 40.
    """
    tokens, joined = tick.facts.kv_tokens, tick.state.joined
    measured = measure(tick, tick.snapshot.at - tick.policy.batching.window_s, 0.0)
    if not tokens or joined is None or measured is None or not measured.sequence_tokens:
        return None
    engines = tick.policy.target.pods_per_replica * joined.engines_per_pod
    blocks = KvLayout(block_tokens=BLOCK_TOKENS, page_bytes=1.0, table_layers=1, windows=(None,))
    held = blocks.sequences(int(tokens / engines) // BLOCK_TOKENS, math.ceil(measured.sequence_tokens))
    return max(1, CROWDED * held)


# --- the decision ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """All that a rule of a rollout may look at: the scene, the pod template, and the note of the last rollout."""

    scene: Scene
    template: Template
    note: Note | None

    @property
    def at(self) -> float:
        """Now."""
        return self.scene.at

    @property
    def target(self) -> TargetStatus:
        """The Deployment."""
        return self.scene.tick.snapshot.target

    @property
    def settings(self) -> RolloutPolicy:
        """The policy's section."""
        return self.scene.settings.rollout or RolloutPolicy()

    @property
    def applied(self) -> bool:
        """Whether every pod that serves is of the newest revision, and that is the template's."""
        target = self.target
        serving = [pod for pod in target.pods if is_serving(pod)]
        newest = all(pod.revision == self.template.revision for pod in serving)
        return newest and bool(serving) and not target.rollout and not target.deployment_paused

    def hold(self, reason: BatchReason, detail: str = "") -> Batching:
        """Return that nothing is written."""
        verified = None
        if self.note is not None and self.note.phase is Phase.KEPT and stands(self.note, self.template):
            verified = self.note.verified
        return replace(self.scene.hold(reason, detail), applied=self.applied, verified=verified)

    def write(self, reason: BatchReason, detail: str, limits: Limits, note: Note, *, back: bool = False) -> Batching:
        """Return what is written: limits, and the note beside them."""
        failed_at = self.scene.tuning.roll_failed_at
        if failed_at is not None and self.at - failed_at < RETRY_S:
            left_s = RETRY_S - (self.at - failed_at)
            return self.hold(BatchReason.COOLDOWN, f"{reason}: the last write failed; again in {left_s:.0f}s")
        action = RollOut(
            uid=self.target.uid,
            container=self.template.container,
            seen=self.template.limits,
            limits=limits,
            note=write_note(note),
            note_seen=self.template.note,
            back=back,
        )
        return replace(self.hold(reason, detail), wanted=limits, roll_out=action, verified=note.verified)


Rule = Callable[[Stage], Batching | None]


def roll(tick: Tick, proposal: Proposal) -> Batching:
    """Return what to make of the limits in the pod template."""
    template = tick.snapshot.target.template
    scene = scene_of(tick, proposal, fleet_of(tick, template or Template()))
    if proposal.final:
        return scene.hold(BatchReason.NOT_OURS, str(proposal.reason))
    if template is None:
        return scene.hold(BatchReason.NO_DATA, "the pod template was not read")
    try:
        note = read_note(template.note)
    except ValueError as error:
        return scene.hold(BatchReason.ROLLOUT_BUDGET, f"the annotation autoscaler/rollout cannot be read: {error}")
    stage = Stage(scene=scene, template=template, note=note)
    return next(batching for rule in RULES if (batching := rule(stage)) is not None)


def wait_while_paused(stage: Stage) -> Batching | None:
    """Write no template of a paused Deployment: it would have no effect now, and one nobody expects later."""
    return stage.hold(BatchReason.DEPLOYMENT_PAUSED) if stage.target.deployment_paused else None


# --- a rollout of ours ----------------------------------------------------------------------------------------------


def follow(stage: Stage) -> Batching | None:
    """See a rollout of ours through: back where its pods do not start, judged once they serve, kept or taken back.

    One whose template somebody has changed since is theirs, and is not judged.
    """
    note = stage.note
    if note is None or not stands(note, stage.template):
        return None
    if note.phase is Phase.BACK:
        return None if stage.applied else stage.hold(BatchReason.ROLLING_OUT, f"back to {note.before}")
    if note.phase is not Phase.TRIAL:
        return None
    broken = why_broken(stage, note)
    if broken:
        return back(stage, note, f"{note.after} does not start: {broken}", harmed=True, crashed=True)
    stuck = why_stuck(stage, note, stage.scene.tick.policy.pending.unschedulable_after_s)
    if stuck:
        return back(stage, note, f"{note.after} finds no room: {stuck}")
    if not stage.applied:
        new = sum(map(is_serving, new_pods(stage, note)))
        return stage.hold(BatchReason.ROLLING_OUT, f"{note.after} for {stage.at - note.at:.0f}s: {new} new pods serve")
    return weigh(stage, note)


def why_broken(stage: Stage, note: Note) -> str:
    """Return why pods of the new revision do not start, or do not live; "" while they may."""
    crashes = stage.scene.tick.policy.pending.crash_restarts
    for pod in new_pods(stage, note):
        if pod.oom_killed:
            return f"{pod.name} ran out of memory"
        if pod.restarts >= crashes:
            return f"{pod.name} has restarted {pod.restarts} times"
        if pod.waiting_reason in BROKEN_STATES and not _waits_for_an_image(pod):
            return f"{pod.name} {pod.waiting_reason}"
    if stage.target.rollout_failed and new_pods(stage, note) and not why_stuck(stage, note, 0.0):
        return "no progress for progressDeadlineSeconds"
    return ""


def why_stuck(stage: Stage, note: Note, after_s: float) -> str:
    """Return why new pods have no place, or no image, which says nothing of the limits; "" while that is recent."""
    if stage.at - note.at < after_s:
        return ""
    if stage.target.refused:
        return stage.target.refused
    for pod in new_pods(stage, note):
        if pod.unschedulable_at is not None and stage.at - pod.unschedulable_at >= after_s:
            return f"{pod.name} finds no node"
        if _waits_for_an_image(pod):
            return f"{pod.name} {pod.waiting_reason}"
    return ""


def new_pods(stage: Stage, note: Note) -> Sequence[Pod]:
    """Return the pods that were made with the new limits: none before the Deployment's controller has seen these."""
    revision = stage.template.revision
    if revision == note.revision:
        return ()
    return [pod for pod in stage.target.pods if pod.revision == revision and not pod.terminating]


def _waits_for_an_image(pod: Pod) -> bool:
    return pod.waiting_reason in ("ImagePullBackOff", "ErrImagePull")


def weigh(stage: Stage, note: Note) -> Batching:
    """Keep or take back what was rolled out, once its pods have served for a whole observation."""
    scene = stage.scene
    moving = leave_in_motion(scene)
    since = scene.tuning.still_since
    if moving is not None or since is None:
        return stage.hold(BatchReason.OBSERVING, f"{note.after}: {'' if moving is None else moving.detail}")
    observe_s = scene.observe_s
    after = measure(scene.tick, max(since, scene.at - observe_s), MIN_SHARE_OF_WINDOW * observe_s)
    shown = verified(stage, note, after)
    if shown is False:
        return back(stage, note, f"the engines do not run with {note.after}", harmed=True)
    if after is None or note.measured is None:
        if scene.at - since < 2.0 * observe_s:
            return stage.hold(BatchReason.OBSERVING, f"{note.after}: too little is known yet")
        return keep(stage, note, "too little is known to judge it", shown)
    before = replace(note.measured, tokens_per_s=note.measured.tokens_per_s * _grown(stage, note))
    trial = Trial(
        reason=note.reason,
        before=note.before,
        after=note.after,
        at=note.at,
        settled_at=since,
        until=scene.at,
        measured=before,
    )
    verdict = judge(scene.tick.policy, trial, after)
    if verdict.kept:
        return keep(stage, note, verdict.words, shown)
    return back(stage, note, f"{note.after}: {verdict.words}", harmed=verdict.harmed)


def _grown(stage: Stage, note: Note) -> float:
    """Return by which factor there are other replicas than when it was begun: what was measured is the target's."""
    return stage.target.current_replicas / note.replicas if note.replicas else 1.0


def verified(stage: Stage, note: Note, after: Measured | None) -> bool | None:
    """Return whether the engines run with the limits; None where nothing shows it.

    A plugin says what its engine was started with. vLLM's own page says no limit, but more requests that run than could
    before leave no doubt.
    """
    said = {one.pod_uid: one for one in stage.scene.tick.snapshot.limits}
    serving = [said.get(pod.uid) for pod in stage.target.pods if is_serving(pod)]
    starts = [_agrees(one, note.after) for one in serving]
    if starts and None not in starts:
        return all(starts)
    if False in starts:
        return False
    was, now = note.before.max_num_seqs, note.after.max_num_seqs
    if after is not None and was is not None and now is not None and was < now and was < after.peak <= now:
        return True
    return None


def _agrees(pod: PodLimits | None, limits: Limits) -> bool | None:
    """Tell whether an engine was started with the limits; None where it does not say."""
    if pod is None or pod.refused:
        return None
    pairs = [
        (limits.max_num_seqs, pod.ceiling.max_num_seqs),
        (limits.max_num_batched_tokens, pod.ceiling.max_num_batched_tokens),
    ]
    known = [wanted == has for wanted, has in pairs if wanted is not None and has is not None]
    return all(known) if known else None


def keep(stage: Stage, note: Note, words: str, shown: bool | None) -> Batching:
    """Return that the limits stay: only the note is written."""
    how = {True: "verified", None: "unverified: nothing that the engines say shows it"}.get(shown, "")
    kept = replace(note, phase=Phase.KEPT, verified=shown, measured=None)
    return _after_replicas(stage, stage.write(BatchReason.KEPT, f"{note.after}: {words}; {how}", note.after, kept))


def back(stage: Stage, note: Note, words: str, *, harmed: bool = False, crashed: bool = False) -> Batching:
    """Return that the limits are those from before, and that these ones are not tried again with this template.

    Pods that do not start come before anything else; a verdict waits while replicas are changed.
    """
    failed = Failed(note.print, note.reason, moved_value(note.reason, note.after), harmed, crashed, stage.at)
    judged = crashed or harmed or stage.applied
    undone = replace(
        note,
        phase=Phase.BACK,
        measured=None,
        failed=(*note.failed, failed)[-FAILED_KEPT:] if judged else note.failed,
    )
    written = stage.write(BatchReason.ROLLED_BACK, words, note.before, undone, back=True)
    return written if not stage.applied else _after_replicas(stage, written)


# --- a new one ------------------------------------------------------------------------------------------------------


def stand_back(stage: Stage) -> Batching | None:
    """Change no template that cannot be changed, is somebody else's, or would take pods away before others serve."""
    found = obstacle(stage.template)
    return None if found is None else stage.hold(*found)


def obstacle(template: Template) -> tuple[BatchReason, str] | None:
    """Return what in a template speaks against any rollout of limits, and in which words; None for nothing."""
    if template.fixed:
        return BatchReason.NOT_EXPRESSIBLE, template.fixed
    if template.owner:
        return BatchReason.TEMPLATE_OWNED, f"{template.owner} would undo it"
    if template.recreate:
        return BatchReason.NO_SURGE_ROOM, "strategy Recreate ends every pod before it makes a new one"
    if template.max_surge < 1:
        return BatchReason.NO_SURGE_ROOM, "maxSurge is 0: a pod is ended before a new one serves"
    if template.max_unavailable > 0:
        words = f"maxUnavailable is {template.max_unavailable}: so many pods are ended before new ones serve"
        return BatchReason.NO_SURGE_ROOM, words
    return None


def wish(stage: Stage) -> Batching:
    """Begin a rollout for what has held the engines back for long enough, where nothing speaks against it."""
    scene = stage.scene
    chosen = relieve(scene) or choose(scene)
    if chosen.wanted is None or chosen.wanted == stage.template.limits:
        return replace(chosen, applied=stage.applied, verified=stage.hold(chosen.reason).verified)
    if scene.bound_s < stage.settings.after_s:
        held = f"{scene.bound} for {scene.bound_s:.0f}s of {stage.settings.after_s:.0f}s"
        return stage.hold(BatchReason.OBSERVING, held)
    wanted, told = chosen.wanted, f"{chosen.reason} to {chosen.wanted}"
    for refusal in (_unfit, _tried, _busy, _spent):
        reason, words = refusal(stage, wanted, chosen.reason)
        if reason is not None:
            return stage.hold(reason, f"{told}: {words}")
    return _after_replicas(stage, _begin(stage, wanted, chosen))


Refusal = tuple[BatchReason | None, str]


def _unfit(stage: Stage, wanted: Limits, _reason: BatchReason) -> Refusal:
    """Return why no engine would start with these limits, or none would be the better for it."""
    template, seqs = stage.template, wanted.max_num_seqs
    wrong = unstartable(wanted, chunked_prefill=template.chunked_prefill, max_model_len=template.max_model_len)
    if not wrong and wanted.max_num_batched_tokens is None and (seqs or 0) > LEAST_TOKENS:
        wrong = f"max_num_seqs {seqs} needs as many max_num_batched_tokens, which the arguments do not say"
    if not wrong and seqs is not None and seqs > (template.limits.max_num_seqs or 0):
        most = crowd(stage.scene.tick)
        if most is None or seqs > most:
            held = "what the KV cache holds is not known" if most is None else f"the KV cache is full with {most}"
            wrong = f"max_num_seqs {seqs} is pointless: {held}"
    return (BatchReason.INVALID, wrong) if wrong else (None, "")


def _tried(stage: Stage, wanted: Limits, reason: BatchReason) -> Refusal:
    """Return whether this was rolled back before, with the same image and arguments."""
    note, forget_s = stage.note, stage.scene.settings.forget_after_s
    failed = [] if note is None else [one for one in note.failed if one.print == stage.template.print]
    lasting = [one for one in failed if one.crashed or stage.at - one.at < forget_s]
    reverted = [Reverted(one.reason, one.value, one.harmed, 2, one.at) for one in lasting]
    if not is_blacklisted(reverted, reason, moved_value(reason, wanted)):
        return None, ""
    values = ", ".join(str(one.value) for one in lasting if one.reason is reason)
    return BatchReason.BLACKLISTED, f"rolled back with this image and these arguments: {values}"


def _busy(stage: Stage, _wanted: Limits, _reason: BatchReason) -> Refusal:
    """Return what is going on that a rollout must not be added to."""
    target, scene = stage.target, stage.scene
    if target.rollout or target.rollout_unhealthy:
        return BatchReason.ROLLOUT_UNDER_WAY, "it has failed" if target.rollout_unhealthy else "not ours"
    homeless = sum(pod.unschedulable_at is not None and not pod.terminating for pod in target.pods)
    if target.refused or homeless:
        return BatchReason.NO_SURGE_ROOM, target.refused or f"{homeless} pods find no node"
    moving, serving = leave_in_motion(scene), sum(map(is_serving, target.pods))
    ordered = target.current_replicas * scene.tick.policy.target.pods_per_replica
    if moving is None and serving != ordered:
        return BatchReason.REPLICAS_MOVING, f"{serving} of {ordered} pods serve"
    return (None, "") if moving is None else (BatchReason.REPLICAS_MOVING, moving.detail)


def _spent(stage: Stage, _wanted: Limits, _reason: BatchReason) -> Refusal:
    begun, settings = begun_today(stage), stage.settings
    per_day = settings.per_day
    if begun and stage.at - begun[-1] < settings.after_s:
        return BatchReason.COOLDOWN, f"{stage.at - begun[-1]:.0f}s of {settings.after_s:.0f}s since the last rollout"
    if len(begun) < per_day:
        return None, ""
    left_s = f"; the next in {begun[-per_day] + DAY_S - stage.at:.0f}s" if per_day else ""
    return BatchReason.ROLLOUT_BUDGET, f"{len(begun)} of {per_day} begun within a day{left_s}"


def begun_today(stage: Stage) -> Sequence[float]:
    """Return when rollouts were begun within the last day, by the note and by this process, in order.

    The clocks of two daemons are not one: what is in the future by ours was now, and a second apart is the same.
    """
    known = {*stage.scene.tuning.rolled_at, *(stage.note.begun if stage.note is not None else ())}
    return list(_apart(sorted(min(one, stage.at) for one in known if stage.at - one < DAY_S)))


def _apart(times: Iterable[float]) -> Iterable[float]:
    last = -math.inf
    for one in times:
        if one - last > 1.0:
            yield one
            last = one


def _begin(stage: Stage, wanted: Limits, chosen: Batching) -> Batching:
    """Return the rollout, or, where the policy asks for a person's approval, the proposal that waits for it."""
    note = Note(
        phase=Phase.TRIAL,
        at=stage.at,
        reason=chosen.reason,
        before=stage.template.limits,
        after=wanted,
        print=stage.template.print,
        revision=stage.template.revision,
        replicas=stage.target.current_replicas,
        measured=chosen.measured,
        begun=(*begun_today(stage), stage.at),
        failed=() if stage.note is None else stage.note.failed,
    )
    written = stage.write(chosen.reason, chosen.detail, wanted, note)
    approval = stage.scene.tick.policy.approval
    if not approval.required or written.roll_out is None:
        return written
    value, up = moved_value(chosen.reason, wanted), chosen.reason not in LOWERING
    standing = stage.scene.tuning.standing
    if standing is None or stage.at >= standing.expires_at or (standing.up, standing.to) != (up, value):
        expires_at = stage.at + approval.expiry_s
        standing = Standing(up=up, to=value, made_at=stage.at, expires_at=expires_at, wished_at=stage.at)
    known = proposal_id(standing)
    if stage.target.approved == known:
        return written
    words = f"{chosen.reason} to {wanted}: approve {known} within {standing.expires_at - stage.at:.0f}s"
    return replace(stage.hold(BatchReason.AWAITING_APPROVAL, words), standing=standing)


def proposal_id(standing: Standing) -> str:
    """Return what a person approves a rollout by, e.g. `limits-up-to-512-t6hxuo`."""
    return f"limits-{standing.id}"


def _after_replicas(stage: Stage, written: Batching) -> Batching:
    """Return the write, unless replicas are changed in this tick: one kind of change at a time, and they go first."""
    proposal = stage.scene.proposal
    if written.roll_out is None or proposal.replicas == proposal.current:
        return written
    return stage.hold(BatchReason.REPLICAS_FIRST, f"{written.reason} to {written.wanted}")


RULES: tuple[Rule, ...] = (wait_while_paused, follow, stand_back, wish)
"""In order: the first that has something to say decides."""
