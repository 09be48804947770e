"""Propose mode: a decision waits for a person. The last step of a proposal, behind every guard."""

from dataclasses import replace

from autoscaler.core.guards import Tick
from autoscaler.core.state import longest_hole_s
from autoscaler.core.types import Proposal, Reason, Standing

APPROVE = "autoscaler/approve"
"""The annotation on the Deployment by which a person approves; its value is the proposal's id."""


def await_approval(tick: Tick, proposal: Proposal) -> Proposal:
    """Hold what no person has approved; of what is approved, do no more than is still wished for."""
    if not tick.policy.approval.required:
        return proposal
    at, current, wish = tick.snapshot.at, proposal.current, proposal.replicas
    standing = _still_standing(tick, proposal)
    if wish == current:
        return replace(proposal, standing=standing)
    up = wish > current
    if standing is None:
        expires_at = at + tick.policy.approval.expiry_s
        standing = Standing(up=up, to=wish, made_at=at, expires_at=expires_at, wished_at=at)
    proposal = replace(proposal, standing=replace(standing, wished_at=at))
    if tick.snapshot.target.approved == standing.id:
        to = min(wish, standing.to) if up else max(wish, standing.to)
        return proposal.moved_to(to, Reason.AWAITING_APPROVAL, f"{standing.id} is approved")
    detail = f"approve {standing.id} within {standing.expires_at - at:.0f}s"
    return proposal.moved_to(current, Reason.AWAITING_APPROVAL, detail)


def _still_standing(tick: Tick, proposal: Proposal) -> Standing | None:
    """Return the proposal that waits, unless it has expired or lapsed, or would be wrong now.

    It lapses when it was not wished for during a minute; a turned wish, replicas that are there already, and bounds
    that have moved withdraw it at once.
    """
    standing, at, bounds = tick.state.standing, tick.snapshot.at, tick.bounds
    if standing is None or at >= standing.expires_at or at - standing.wished_at > longest_hole_s(tick.policy):
        return None
    sign = 1 if standing.up else -1
    turned = sign * (proposal.replicas - proposal.current) < 0
    reached = sign * (standing.to - proposal.current) <= 0
    outside = not bounds.min <= standing.to <= bounds.max
    return None if turned or reached or outside else standing
