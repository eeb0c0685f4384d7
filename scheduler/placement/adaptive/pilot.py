"""What the planner looks at: the estimates, and which task is where. Told of every dispatch and of every answer.

No I/O and no clock: time is passed in, so a simulation can drive it as the dispatcher does.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator, BaseModel, Field

from scheduler.placement.adaptive.backlog import forecast
from scheduler.placement.adaptive.estimates import Estimate
from scheduler.placement.adaptive.planner import Ask, EndState, Hold, Outlook, Send, UpperState, outlook, plan
from scheduler.placement.mapping import Node
from tierkit.types import Tier
from tierkit.wire.oip import Timing

__all__ = ["LinkEstimate", "NodeEstimate", "Pilot"]

Milli = Annotated[float, AfterValidator(lambda value: round(value, 3))]
TenthOfMilli = Annotated[float, AfterValidator(lambda value: round(value, 4))]

_CUSHION_S = 0.15
"""So long, and one task more, may wait at an upstream node, that it has work while answers are on their way."""

_AHEAD_TASKS, _AHEAD_S = 1.5, 0.05
"""An end device gets another task when it will be done with its planned ones within this many tasks' time, this many
seconds and its answer's way to the scheduler: it is never idle, and no choice is made too early."""

_BLIND_TASKS = 6
"""Tasks that an upstream node may have while nothing is known of the link to it: the first answers will tell."""

_MOST_TASKS = 64
"""Tasks that an end device or an upstream node may have in all; an end device holds the images of each in memory."""

_WORTH_S, _WORTH = 0.3, 0.3
"""A task is taken away from its upstream node when it gains at least this many seconds, and this fraction of the time
that it still has to wait: estimates err, and what the node has done of it is lost."""

_MOST_LINKS = 65_536
"""Links that are remembered; beyond that the one that was met first is forgotten."""


class NodeEstimate(BaseModel):
    """What the scheme `adaptive` thinks of a node now."""

    node_id: str
    tier: Tier
    ms_per_image: TenthOfMilli
    samples: int = Field(description="Answers that this comes from; 0: the node's own measurement at its start.")
    tasks: int = Field(description="On their way to it, waiting there or being computed.")
    backlog_s: Milli = Field(description="Until it will be done with them.")


class LinkEstimate(BaseModel):
    """What it thinks of the link between an end device and an upstream node."""

    end: str
    upper: str
    seconds: TenthOfMilli = Field(description="There and back, without the work in between.")
    samples: int


@dataclass(slots=True, kw_only=True)
class _Flight:
    """A task on its way."""

    end: str
    upper: str | None
    images: int
    sent_at: float
    planned: bool
    """Whether this scheme has sent it."""
    due_at: float
    """When the device was expected to have computed the coarse answer when the task was sent."""
    coarse_at: float | None = None
    """When the device had computed the coarse answer; None while it owes it."""


@dataclass(frozen=True, slots=True)
class _Backlog:
    """When each node is done with what it has."""

    free_at: dict[str, float]
    tasks: dict[str, int]
    slowness: dict[str, float]
    """How many times slower than estimated a node is by the answer that it owes; 1 where not named."""
    planned_s: dict[str, float]
    """Until an end device will have computed what this scheme has sent it, were there nothing else."""
    finish: dict[Hashable, float]
    """When the answers of the upstream nodes to the tasks on their way are expected at the scheduler."""


class Pilot:
    """State of the scheme `adaptive`.

    Args:
        link_s: seconds from an end device to a tier and back, as far as they are known beforehand; 0 for unknown.
        hop_s: the same between the scheduler and an end device.
        accuracy: of the fine answers, by model; empty for unknown.
    """

    def __init__(self, *, link_s: Mapping[Tier, float], hop_s: float, accuracy: Mapping[str, float]) -> None:
        self._link_prior_s = link_s
        self._hop_prior_s = hop_s
        self._accuracy = accuracy
        self._speeds: dict[str, Estimate] = {}
        """Seconds per image, by node."""
        self._hops: dict[str, Estimate] = {}
        self._links: dict[tuple[str, str], Estimate] = {}
        self._links_to: dict[str, Estimate] = {}
        """From whichever end device to an upstream node: what is expected of a pair that has not met."""
        self._tiers: dict[str, Tier] = {}
        self._flights: dict[Hashable, _Flight] = {}
        self._joins: dict[str, int] = {}
        """Most tasks that a node has computed in one batch."""
        self._from_end: dict[str, dict[Hashable, _Flight]] = {}
        self._to_upper: dict[str, dict[Hashable, _Flight]] = {}
        self._done_at: dict[str, float] = {}
        """When a node finished the last task that is known of."""

    # --- what has happened ----------------------------------------------------------------------------------------

    def sent(
        self,
        key: Hashable,
        *,
        end: Node,
        upper: Node | None,
        images: int,
        now: float,
        fine_only: bool = False,
        planned: bool = True,
    ) -> None:
        """A task is on its way; `key` names the attempt.

        Args:
            fine_only: the end device just passes it on.
            planned: this scheme has sent it.
        """
        speed = self._speed(end)
        if upper is not None:
            self._speed(upper)
        flights = self._from_end.setdefault(end.node_id, {})
        reached = now + self._hop_s(end.node_id, now) / 2
        owed = (flight.due_at for flight in flights.values() if flight.coarse_at is None)
        begun = max(reached, max(owed, default=0.0))
        flight = self._flights[key] = _Flight(
            end=end.node_id,
            upper=None if upper is None else upper.node_id,
            images=images,
            sent_at=now,
            planned=planned,
            due_at=begun + images * speed.value(now),
            coarse_at=reached if fine_only else None,
        )
        flights[key] = flight
        if upper is not None:
            self._to_upper.setdefault(upper.node_id, {})[key] = flight

    def coarse(self, key: Hashable, timing: Timing, now: float) -> None:
        """The coarse answer of an attempt has arrived."""
        flight = self._flights.get(key)
        if flight is None or flight.coarse_at is not None:
            return
        self._learn_speed(flight.end, timing, flight.images, now)
        hop_s = max(0.0, now - flight.sent_at - timing.queue_s - timing.compute_s)
        hop = self._hops.get(flight.end, Estimate(prior=self._hop_prior_s)).observe(hop_s, now, trust_first=True)
        self._hops[flight.end] = hop
        flight.coarse_at = self._done_at[flight.end] = now - hop.value(now) / 2

    def fine(self, key: Hashable, upper: str, timing: Timing | None, round_trip_s: float, now: float) -> None:
        """An upstream node has answered.

        Args:
            timing: None where the node does not tell.
            round_trip_s: from the end device's question to the answer.
        """
        flight = self._flights.get(key)
        if flight is None or upper not in self._speeds:
            return
        link_s = self._link_s(flight.end, upper, now)
        if timing is not None:
            self._learn_speed(upper, timing, flight.images, now)
            link_s = max(0.0, round_trip_s - timing.queue_s - timing.compute_s)
            pair = flight.end, upper
            unknown = Estimate(prior=link_s)
            self._links[pair] = self._links.get(pair, unknown).observe(link_s, now, trust_first=True)
            if len(self._links) > _MOST_LINKS:
                del self._links[next(iter(self._links))]
            self._links_to[upper] = self._links_to.get(upper, unknown).observe(link_s, now, trust_first=True)
        self._done_at[upper] = now - (self._hop_s(flight.end, now) + link_s) / 2
        self.ended(key)

    def taken_away(self, key: Hashable, now: float) -> None:
        """An attempt is given up because its upstream node is slow; how slow at least is all that will be known."""
        flight = self._flights.get(key)
        if flight is not None and flight.upper is not None:
            slow = self._backlog(None, [flight.upper], now).slowness.get(flight.upper, 1.0)
            speed = self._speeds[flight.upper]
            self._speeds[flight.upper] = speed.at_least(slow * speed.value(now), now)
        self.ended(key)

    def ended(self, key: Hashable) -> None:
        """An attempt is over, however it ended."""
        flight = self._flights.pop(key, None)
        if flight is not None:
            self._from_end[flight.end].pop(key, None)
            if flight.upper is not None:
                self._to_upper[flight.upper].pop(key, None)

    # --- what shall happen ----------------------------------------------------------------------------------------

    def plan(
        self,
        ask: Ask,
        images: int,
        ends: Sequence[Node],
        uppers: Sequence[Node],
        now: float,
        *,
        fine_only: bool = False,
        known: Outlook | None = None,
    ) -> Send | Hold | None:
        """Where a task of `images` images goes; see `planner.plan`.

        Args:
            fine_only: the coarse answer is known, so that an end device just passes the task on.
            known: of the whole fleet, where `ends` and `uppers` are but a part of it.
        """
        in_parts = known is not None and known.in_parts
        backlog = self._backlog_of(ends, uppers, now, images=images) if in_parts else self._backlog(None, None, now)
        return plan(
            ask,
            [self._end_state(node, images, backlog, now, fine_only=fine_only) for node in ends],
            [self._upper_state(node, images, backlog, now) for node in uppers],
            link=lambda end, upper: self._link_s(end, upper, now),
            now=now,
            known=known,
        )

    def outlook(
        self,
        remaining: int,
        images: int,
        ends: Sequence[Node],
        uppers: Sequence[Node],
        now: float,
        *,
        in_parts: bool,
    ) -> Outlook:
        """When `remaining` tasks can be done by a whole fleet: for `plan`.

        Args:
            in_parts: only some of its nodes are looked at for each task.
        """
        backlog = self._backlog_of(ends, uppers, now)
        return outlook(
            remaining,
            [self._end_state(node, images, backlog, now, fine_only=False) for node in ends],
            [self._upper_state(node, images, backlog, now) for node in uppers],
            link=lambda end, upper: self._link_s(end, upper, now),
            now=now,
            in_parts=in_parts,
        )

    def with_room(self, ends: Sequence[Node], images: int, now: float, *, fine_only: bool = False) -> list[Node]:
        """The end devices that may receive a task now."""
        backlog = self._backlog_of(ends, (), now)
        return [end for end in ends if self._end_state(end, images, backlog, now, fine_only=fine_only).has_room]

    def misplaced(
        self,
        ask: Ask,
        keys: Collection[Hashable],
        images: int,
        ends: Sequence[Node],
        uppers: Sequence[Node],
        now: float,
    ) -> tuple[Hashable, str] | None:
        """The attempt among `keys` that is to be given up, because its task would be done much earlier if it went
        elsewhere now, and the reason; None for none. One at a time: each changes what is best for the others.

        Args:
            ask: of the tasks that are still to be sent; `remaining` counts the one that would come to them.
            keys: attempts of the job whose coarse answers are there.
        """
        waiting = [
            key for key in keys if (flight := self._flights.get(key)) is not None and flight.coarse_at is not None
        ]
        if not waiting or not ends or not uppers:
            return None
        backlog = self._backlog(None, None, now)
        key = max(waiting, key=lambda key: backlog.finish.get(key, 0.0))
        upper = self._flights[key].upper
        others = [node for node in uppers if node.node_id != upper]
        if upper is None or not others:
            return None
        best = outlook(
            ask.remaining,
            # The others that are still to be sent need their coarse answers; this one alone does not.
            [self._end_state(node, images, backlog, now, fine_only=ask.remaining == 1) for node in ends],
            [self._upper_state(node, images, backlog, now) for node in others],
            link=lambda end, node_id: self._link_s(end, node_id, now),
            now=now,
        ).last
        finish = backlog.finish[key]
        gain_s = finish - best
        if gain_s <= max(_WORTH_S, _WORTH * (finish - now)):
            return None
        why = f"{upper} is expected to answer in {finish - now:.2f} s, another upstream node in {best - now:.2f} s"
        return key, why

    def estimates(
        self, ends: Sequence[Node], uppers: Sequence[Node], now: float
    ) -> tuple[list[NodeEstimate], list[LinkEstimate]]:
        """What is thought of these nodes now, and of the links between those that have met."""
        backlog = self._backlog(None, None, now)
        nodes = [
            NodeEstimate(
                node_id=node.node_id,
                tier=node.tier,
                ms_per_image=self._speed(node).value(now) * 1000,
                samples=self._speed(node).samples,
                tasks=backlog.tasks.get(node.node_id, 0),
                backlog_s=max(0.0, backlog.free_at.get(node.node_id, now) - now),
            )
            for node in (*ends, *uppers)
        ]
        links = [
            LinkEstimate(end=end.node_id, upper=upper.node_id, seconds=estimate.value(now), samples=estimate.samples)
            for end in ends
            for upper in uppers
            if (estimate := self._links.get((end.node_id, upper.node_id))) is not None
        ]
        return nodes, links

    def _end_state(self, node: Node, images: int, backlog: _Backlog, now: float, *, fine_only: bool) -> EndState:
        node_id = node.node_id
        room, hop_s = backlog.tasks.get(node_id, 0) < _MOST_TASKS, self._hop_s(node_id, now)
        if fine_only:
            return EndState(node_id=node_id, has_room=room, free_at=now, seconds=0.0, hop_s=hop_s)
        seconds = images * self._speed(node).value(now) * backlog.slowness.get(node_id, 1.0)
        ahead_s = backlog.planned_s.get(node_id, 0.0)
        return EndState(
            node_id=node_id,
            has_room=room and ahead_s <= _AHEAD_TASKS * seconds + _AHEAD_S + hop_s,
            free_at=backlog.free_at.get(node_id, now),
            seconds=seconds,
            hop_s=hop_s,
        )

    def _upper_state(self, node: Node, images: int, backlog: _Backlog, now: float) -> UpperState:
        seconds = images * self._speed(node).value(now) * backlog.slowness.get(node.node_id, 1.0)
        tasks = backlog.tasks.get(node.node_id, 0)
        known = node.node_id in self._links_to or self._link_prior_s[node.tier] > 0
        return UpperState(
            node=node,
            free_at=backlog.free_at.get(node.node_id, now),
            seconds=seconds,
            slack_s=seconds + _CUSHION_S if known else float("inf"),
            has_room=tasks < (_MOST_TASKS if known else _BLIND_TASKS),
            accuracy=self._accuracy.get(node.model, 0.0),
        )

    def _backlog(
        self,
        ends: Iterable[str] | None,
        uppers: Iterable[str] | None,
        now: float,
        *,
        images: int | None = None,
    ) -> _Backlog:
        """When these nodes are done with what they have; None for all.

        Args:
            images: of a task that one of the end devices is about to get, of a large fleet. Tasks of others that come
                to an upstream node after it do not make it wait.
        """
        found = _Backlog({}, {}, {}, {}, {})
        coarse_due: dict[Hashable, float] = {}
        next_due = math.inf
        for end in list(self._from_end) if ends is None else ends:
            flights = self._from_end.get(end, {})
            found.tasks[end] = len(flights)
            half_s, per_image = self._hop_s(end, now) / 2, self._speeds[end].value(now)
            owed = {key: flight for key, flight in flights.items() if flight.coarse_at is None}
            done = now + half_s
            if owed:
                idle_since = self._done_at.get(end, 0.0)
                found.slowness[end], done_at = forecast(
                    [(flight.sent_at + half_s, flight.images * per_image) for flight in owed.values()],
                    idle_since=idle_since,
                    known=now - half_s,
                    joins=self._joins.get(end, 1),
                )
                coarse_due.update(zip(owed, done_at, strict=True))
                done = idle_since
                for flight, flight_done in zip(owed.values(), done_at, strict=True):
                    if flight.planned:
                        # Of the task at the head only what is left.
                        begun = max(done, flight.sent_at + half_s, now)
                        left_s = max(0.0, flight_done - begun)
                        found.planned_s[end] = found.planned_s.get(end, 0.0) + left_s
                    done = flight_done
                found.free_at[end] = done
            if images is not None:
                next_due = min(next_due, done + images * per_image)
        for upper in list(self._to_upper) if uppers is None else uppers:
            at_upper = self._to_upper.get(upper, {})
            found.tasks[upper] = len(at_upper)
            if not at_upper:
                continue
            per_image = self._speeds[upper].value(now)
            arrivals = []
            for key, flight in at_upper.items():
                coarse_at = flight.coarse_at
                if coarse_at is None:
                    coarse_at = coarse_due.get(key, max(flight.due_at, now))
                half_s = self._link_s(flight.end, upper, now) / 2
                arrivals.append((coarse_at + half_s, flight.images * per_image, key, flight))
            arrivals.sort(key=lambda one: one[0])
            before = next_due + self._link_s("", upper, now) / 2
            arrivals = [one for one in arrivals if one[0] <= before] or arrivals[:1]
            found.slowness[upper], done_at = forecast(
                [one[:2] for one in arrivals],
                idle_since=self._done_at.get(upper, 0.0),
                # What has not come by now had not been done when its answer would have set out.
                known=now - self._back_s(arrivals[0][3], upper, now),
                joins=self._joins.get(upper, 1),
            )
            for (_, _, key, flight), upper_done in zip(arrivals, done_at, strict=True):
                found.free_at[upper] = upper_done
                found.finish[key] = upper_done + self._back_s(flight, upper, now)
        return found

    def _backlog_of(
        self, ends: Sequence[Node], uppers: Sequence[Node], now: float, *, images: int | None = None
    ) -> _Backlog:
        for node in (*ends, *uppers):
            self._speed(node)
        return self._backlog([node.node_id for node in ends], [node.node_id for node in uppers], now, images=images)

    def _back_s(self, flight: _Flight, upper: str, now: float) -> float:
        """From an upstream node's answer to its arrival at the scheduler."""
        return (self._link_s(flight.end, upper, now) + self._hop_s(flight.end, now)) / 2

    # --- estimates ------------------------------------------------------------------------------------------------

    def _speed(self, node: Node) -> Estimate:
        """A node that has started again has measured itself again, and begins anew."""
        prior = node.ms_per_image / 1000
        self._tiers[node.node_id] = node.tier
        known = self._speeds.get(node.node_id)
        if known is None or known.prior != prior:
            known = self._speeds[node.node_id] = Estimate(prior=prior)
            self._joins.pop(node.node_id, None)
        return known

    def _learn_speed(self, node_id: str, timing: Timing, images: int, now: float) -> None:
        if timing.batch_images:
            # Bounded, since it is never forgotten: no more tasks than a node gets.
            joins = min(timing.batch_images // images, _MOST_TASKS)
            self._joins[node_id] = max(self._joins.get(node_id, 1), joins)
            per_image_s = timing.compute_s / timing.batch_images
            self._speeds[node_id] = self._speeds[node_id].observe(per_image_s, now, may_change=True)

    def _hop_s(self, end: str, now: float) -> float:
        known = self._hops.get(end)
        return self._hop_prior_s if known is None else known.value(now)

    def _link_s(self, end: str, upper: str, now: float) -> float:
        known = self._links.get((end, upper)) or self._links_to.get(upper)
        return self._link_prior_s[self._tiers[upper]] if known is None else known.value(now)

    def forget(self, node_id: str) -> None:
        """The node has left the device list; nothing happens while it has tasks."""
        if not (self._from_end.get(node_id) or self._to_upper.get(node_id)):
            for known in (self._speeds, self._hops, self._links_to, self._done_at, self._joins, self._tiers):
                known.pop(node_id, None)
            for waiting in (self._from_end, self._to_upper):
                waiting.pop(node_id, None)
