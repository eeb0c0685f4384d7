"""The planner's view: estimates of nodes and links, and the backlog of each node by the attempts in the ledger.

No I/O and no clock: time is passed in, so a simulation can drive it as the dispatcher does.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import median
from typing import Annotated

from pydantic import AfterValidator, BaseModel, Field

from scheduler.core.device import Node
from scheduler.core.fleet import Ledger
from scheduler.core.work import Attempt, AttemptFacts
from scheduler.placement.adaptive.backlog import forecast
from scheduler.placement.adaptive.encoding import EncodingTimes
from scheduler.placement.adaptive.estimates import Estimate
from scheduler.placement.adaptive.planner import Ask, EndState, Hold, Outlook, Send, UpstreamState, outlook, plan
from tierkit.types import Tier
from tierkit.wire.oip import Timing

__all__ = ["LinkEstimate", "NodeEstimate", "Pilot"]

Milli = Annotated[float, AfterValidator(lambda value: round(value, 3))]
TenthOfMilli = Annotated[float, AfterValidator(lambda value: round(value, 4))]

_CUSHION_S = 0.15
"""Work that may wait at an upstream node in addition to one task, in seconds, so that it stays busy while answers are
on their way."""

_AHEAD_TASKS, _AHEAD_S = 1.5, 0.05
"""An end device gets another task when it will finish its planned ones within this many tasks' time, plus this many
seconds and the time of its answer to the scheduler. So it is never idle, and no choice is made too early."""

_BLIND_TASKS = 6
"""Tasks that an upstream node may have while nothing is known of the link to it: the first answers will tell."""

_MOST_TASKS = 64
"""Tasks that an end device or an upstream node may have in all; an end device holds the images of each in memory."""

_WORTH_S, _WORTH = 0.3, 0.3
"""Least gain for which a task is taken from its upstream node: this many seconds, and this fraction of its remaining
wait. Estimates err, and the work that the node has done for the task is lost."""

_MOST_LINKS, _SOME_LINKS = 65_536, 1_000
"""Number of links that are remembered; beyond it, the oldest is forgotten."""


class NodeEstimate(BaseModel):
    """The present estimates of a node."""

    node_id: str = Field(description="Id of the node.")
    tier: Tier = Field(description="Tier of the node.")
    ms_per_image: TenthOfMilli = Field(description="Milliseconds per image.")
    samples: int = Field(description="Answers that this comes from; 0: the node's own measurement at its start.")
    tasks: int = Field(description="Tasks on their way to the node, waiting there or being computed.")
    backlog_s: Milli = Field(description="Seconds until it will have finished these tasks.")


class LinkEstimate(BaseModel):
    """The present estimate of the link between an end device and an upstream node."""

    end: str = Field(description="Id of the end device.")
    upper: str = Field(description="Id of the upstream node.")
    seconds: TenthOfMilli = Field(description="Seconds for the way there and back, without the work in between.")
    samples: int = Field(description="Answers that this comes from.")


@dataclass(slots=True)
class _Known:
    """The estimates of a node."""

    tier: Tier
    speed: Estimate
    """Seconds per image."""
    way: Estimate | None = None
    """Seconds there and back: between the scheduler and an end device, between any end device and an upstream node."""
    joins: int = 1
    """Most tasks that it has computed in one batch."""
    done_at: float = 0.0
    """Time at which it finished the last task that is known of."""


@dataclass(slots=True)
class _Load:
    """The work of a node."""

    free_at: float
    """Time at which it is done with that."""
    tasks: int = 0
    slowness: float = 1.0
    """Factor by which it is slower than estimated, by the answer that it owes."""
    planned_s: float = 0.0
    """Seconds until an end device will have computed the tasks of this scheme, if it had nothing else to do."""


class _Backlog(defaultdict[str, _Load]):
    """The work of each node; a node that is not named has none."""

    def __init__(self, now: float) -> None:
        super().__init__(lambda: _Load(now))
        self.finish: dict[Attempt, float] = {}
        """Time at which the answers of the upstream nodes to the tasks on their way are expected at the scheduler."""


class Pilot:
    """State of the scheme `adaptive`.

    Args:
        ledger: the attempts in flight; read only.
        link_s: seconds from an end device to a tier and back, as far as they are known beforehand; 0 for unknown.
        hop_s: the same between the scheduler and an end device.
        accuracy: of the fine answers, by sha256 of the network; empty for unknown.
    """

    def __init__(
        self, ledger: Ledger, *, link_s: Mapping[Tier, float], hop_s: float, accuracy: Mapping[str, float]
    ) -> None:
        self._ledger = ledger
        self._link_prior_s = link_s
        self._hop_prior_s = hop_s
        self._accuracy = accuracy
        self.encoding = EncodingTimes()
        """Choice of the node that encodes images with `encode_on=auto`; used by all schemes."""
        self._nodes: dict[str, _Known] = {}
        self._links: dict[tuple[str, str], Estimate] = {}
        """Estimates of the links between end devices and upstream nodes that have met."""
        self._ways: dict[Tier, Estimate] = {}
        """Estimates of the links to a tier, used for a node that has not answered yet."""

    # --- what has happened ----------------------------------------------------------------------------------------

    def due_at(self, end: Node, upper: Node | None, images: int, now: float) -> float:
        """Return the time at which an end device will have computed the coarse answer to a task that is sent now."""
        known = self._known(end)
        if upper is not None:
            self._known(upper)
        reached = now + self._hop_s(end.node_id, now) / 2
        owed = (each.facts.due_at for each in self._flights(end.node_id) if each.owed)
        return max(reached, max(owed, default=0.0)) + images * known.speed.value(now)

    def coarse(self, facts: AttemptFacts, timing: Timing, now: float) -> None:
        """The coarse answer of an attempt has arrived."""
        end = self._nodes.get(facts.node_id)
        if end is None:
            return
        _learn_speed(end, timing, facts.images, now)
        hop_s = max(0.0, now - facts.started - timing.queue_s - timing.compute_s)
        end.way = (end.way or Estimate(prior=self._hop_prior_s)).observe(hop_s, now, trust_first=True)
        end.done_at = now - end.way.value(now) / 2

    def fine(self, facts: AttemptFacts, upper: str, timing: Timing | None, round_trip_s: float, now: float) -> None:
        """An upstream node has answered.

        Args:
            timing: None if the node does not tell.
            round_trip_s: from the end device's question to the answer.
        """
        end, known = facts.node_id, self._nodes.get(upper)
        if known is None:
            return
        link_s = self._link_s(end, upper, now)
        if timing is not None:
            _learn_speed(known, timing, facts.images, now)
            link_s = max(0.0, round_trip_s - timing.queue_s - timing.compute_s)
            pair = end, upper
            unknown = Estimate(prior=link_s)
            self._links[pair] = self._links.get(pair, unknown).observe(link_s, now, trust_first=True)
            if len(self._links) > _MOST_LINKS:
                del self._links[next(iter(self._links))]
            known.way = (known.way or unknown).observe(link_s, now, trust_first=True)
            self._ways[known.tier] = self._ways.get(known.tier, unknown).observe(link_s, now, trust_first=True)
        known.done_at = now - (self._hop_s(end, now) + link_s) / 2

    def taken_away(self, attempt: Attempt, now: float) -> None:
        """An attempt is about to be given up because its upstream node is slow; how slow at least is all that will be
        known."""
        upper = attempt.facts.first_asked[0]
        known, slowness = self._nodes[upper], self._backlog(now)[upper].slowness
        known.speed = known.speed.at_least(slowness * known.speed.value(now), now)

    def forget(self, node_id: str) -> None:
        """The node has left the device list, and has no attempts."""
        self._nodes.pop(node_id, None)
        self.encoding.forget(node_id)

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
        """Plan a task of `images` images; see `planner.plan`.

        Args:
            fine_only: the coarse answer is known, so an end device only passes the task on.
            known: outlook of the whole fleet, if `ends` and `uppers` are only a part of it.
        """
        if known is not None and known.in_parts:
            backlog = self._backlog(now, ends, uppers, images=images)
        else:
            backlog = self._backlog_of(ends, uppers, now)
        return plan(
            ask,
            [self._end_state(node, images, backlog, now, fine_only=fine_only) for node in ends],
            [self._upstream_state(node, images, backlog, now) for node in uppers],
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
        """Return the time at which `remaining` tasks can be done by a whole fleet: for `plan`.

        Args:
            in_parts: only some of its nodes are looked at for each task.
        """
        backlog = self._backlog(now, ends, uppers)
        return outlook(
            remaining,
            [self._end_state(node, images, backlog, now, fine_only=False) for node in ends],
            [self._upstream_state(node, images, backlog, now) for node in uppers],
            link=lambda end, upper: self._link_s(end, upper, now),
            now=now,
            in_parts=in_parts,
        )

    def with_room(self, ends: Sequence[Node], images: int, now: float, *, fine_only: bool = False) -> list[Node]:
        """The end devices that may receive a task now."""
        backlog = self._backlog(now, ends, ())
        return [end for end in ends if self._end_state(end, images, backlog, now, fine_only=fine_only).has_room]

    def with_time(self, uppers: Sequence[Node], images: int, now: float) -> list[Node]:
        """The upstream nodes that would begin with another task soon."""
        backlog = self._backlog(now, (), uppers)
        states = [self._upstream_state(node, images, backlog, now) for node in uppers]
        return [state.node for state in states if state.has_room and state.free_at - now <= state.slack_s]

    def misplaced(
        self,
        ask: Ask,
        attempts: Collection[Attempt],
        images: int,
        ends: Sequence[Node],
        uppers: Sequence[Node],
        now: float,
    ) -> tuple[Attempt, str] | None:
        """The one of these attempts that is to be given up, because its task would be done much earlier if it went
        elsewhere now, and the reason; None for none. One at a time: each changes what is best for the others.

        Args:
            ask: of the tasks that are still to be sent; `remaining` counts this task as well.
            attempts: of the job, whose coarse answers are there.
        """
        waiting = [attempt for attempt in attempts if attempt.facts.first_asked]
        if not waiting or not ends or not uppers:
            return None
        backlog = self._backlog_of(ends, uppers, now)
        attempt = max(waiting, key=lambda each: backlog.finish.get(each, 0.0))
        upper = attempt.facts.first_asked[0]
        others = [node for node in uppers if node.node_id != upper]
        if attempt not in backlog.finish or not others:
            return None
        best = outlook(
            ask.remaining,
            # The others that are still to be sent need their coarse answers; this one alone does not.
            [self._end_state(node, images, backlog, now, fine_only=ask.remaining == 1) for node in ends],
            [self._upstream_state(node, images, backlog, now) for node in others],
            link=lambda end, node_id: self._link_s(end, node_id, now),
            now=now,
        ).last
        finish = backlog.finish[attempt]
        gain_s = finish - best
        if gain_s <= max(_WORTH_S, _WORTH * (finish - now)):
            return None
        why = f"{upper} is expected to answer in {finish - now:.2f} s, another upstream node in {best - now:.2f} s"
        return attempt, why

    def estimates(
        self, ends: Sequence[Node], uppers: Sequence[Node], now: float
    ) -> tuple[list[NodeEstimate], list[LinkEstimate]]:
        """The present estimates of these nodes, and of the links between those that have met."""
        backlog = self._backlog(now)
        nodes = [
            NodeEstimate(
                node_id=node.node_id,
                tier=node.tier,
                ms_per_image=self._known(node).speed.value(now) * 1000,
                samples=self._known(node).speed.samples,
                tasks=backlog[node.node_id].tasks,
                backlog_s=max(0.0, backlog[node.node_id].free_at - now),
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

    def links(self, now: float) -> dict[Tier, float]:
        """Seconds to each tier and back, as far as answers have told: a median, so that one device that lies or has a
        slow link does not decide."""
        found: dict[Tier, list[float]] = {}
        for (_, upper), link in islice(reversed(self._links.items()), _SOME_LINKS):
            if (known := self._nodes.get(upper)) is not None:
                found.setdefault(known.tier, []).append(link.value(now))
        hops = (each.way for each in self._nodes.values() if each.tier is Tier.END and each.way is not None)
        found[Tier.END] = [way.value(now) for way in islice(hops, _SOME_LINKS)]
        return {tier: median(seconds) for tier, seconds in found.items() if seconds}

    def speed_of(self, node_id: str, now: float) -> float | None:
        """Seconds per image of a node, as its answers tell; None before the first."""
        known = self._nodes.get(node_id)
        return known.speed.value(now) if known is not None and known.speed.samples else None

    def _end_state(self, node: Node, images: int, backlog: _Backlog, now: float, *, fine_only: bool) -> EndState:
        load, hop_s = backlog[node.node_id], self._hop_s(node.node_id, now)
        room = load.tasks < _MOST_TASKS
        if fine_only:
            return EndState(
                node_id=node.node_id,
                has_room=room,
                free_at=now,
                seconds=0.0,
                hop_s=hop_s,
                allowed_upstreams=node.allowed_upstreams,
            )
        seconds = images * self._known(node).speed.value(now) * load.slowness
        return EndState(
            node_id=node.node_id,
            has_room=room and load.planned_s <= _AHEAD_TASKS * seconds + _AHEAD_S + hop_s,
            free_at=load.free_at,
            seconds=seconds,
            hop_s=hop_s,
            allowed_upstreams=node.allowed_upstreams,
        )

    def _upstream_state(self, node: Node, images: int, backlog: _Backlog, now: float) -> UpstreamState:
        known, load = self._known(node), backlog[node.node_id]
        seconds = images * known.speed.value(now) * load.slowness
        way_known = known.way is not None or self._link_prior_s[node.tier] > 0
        return UpstreamState(
            node=node,
            free_at=load.free_at,
            seconds=seconds,
            slack_s=seconds + _CUSHION_S if way_known else math.inf,
            has_room=load.tasks < (_MOST_TASKS if way_known else _BLIND_TASKS),
            sharers=max(1, len({flight.facts.site for flight in self._ledger.assigned.at(node.node_id)})),
            accuracy=self._accuracy.get(node.sha256, 0.0),
        )

    def _backlog_of(self, ends: Sequence[Node], uppers: Sequence[Node], now: float) -> _Backlog:
        """Return the time at which the nodes of a fleet are done, or these of a site."""
        return self._backlog(now, ends, uppers) if any(end.site for end in ends) else self._backlog(now)

    def _backlog(
        self,
        now: float,
        ends: Sequence[Node] | None = None,
        uppers: Sequence[Node] | None = None,
        *,
        images: int | None = None,
    ) -> _Backlog:
        """Return the time at which these nodes are done with what they have; None for all.

        Args:
            images: of a task that one of the end devices is about to get, of a large fleet. Tasks of others that come
                to an upstream node after it do not make it wait.
        """
        at_ends = self._those(ends, lambda tier: tier is Tier.END)
        at_uppers = self._those(uppers, lambda tier: tier is not Tier.END)
        found = _Backlog(now)
        coarse_due: dict[Attempt, float] = {}
        next_due = math.inf
        for end, node in at_ends:
            load = found[end]
            flights = self._flights(end)
            load.tasks = len(flights)
            half_s, per_image = self._hop_s(end, now) / 2, node.speed.value(now)
            owed = [flight for flight in flights if flight.owed]
            done = now + half_s
            if owed:
                load.slowness, done_at = forecast(
                    [(flight.facts.started + half_s, flight.facts.images * per_image) for flight in owed],
                    idle_since=node.done_at,
                    known=now - half_s,
                    joins=node.joins,
                )
                coarse_due.update(zip(owed, done_at, strict=True))
                done = node.done_at
                for flight, flight_done in zip(owed, done_at, strict=True):
                    if flight.facts.planned:
                        # Of the task at the head only what is left.
                        begun = max(done, flight.facts.started + half_s, now)
                        load.planned_s += max(0.0, flight_done - begun)
                    done = flight_done
                load.free_at = done
            if images is not None:
                next_due = min(next_due, done + images * per_image)
        for upper, node in at_uppers:
            load = found[upper]
            flights = self._flights(upper)
            load.tasks = len(flights)
            if not flights:
                continue
            per_image = node.speed.value(now)
            arrivals = []
            for flight in flights:
                facts = flight.facts
                hop_s, link_s = self._hop_s(facts.node_id, now), self._link_s(facts.node_id, upper, now)
                if flight.owed:
                    coarse_at = coarse_due.get(flight, max(facts.due_at, now))
                elif flight.coarse_at is None:
                    coarse_at = facts.started + hop_s / 2
                else:
                    coarse_at = flight.coarse_at - hop_s / 2
                # The last is the way of the answer to the scheduler.
                arrivals.append((coarse_at + link_s / 2, facts.images * per_image, (link_s + hop_s) / 2, flight))
            arrivals.sort(key=lambda one: one[0])
            before = next_due + self._link_s("", upper, now) / 2
            arrivals = [one for one in arrivals if one[0] <= before] or arrivals[:1]
            load.slowness, done_at = forecast(
                [one[:2] for one in arrivals],
                idle_since=node.done_at,
                # What has not come by now had not been done when its answer would have set out.
                known=now - arrivals[0][2],
                joins=node.joins,
            )
            for (_, _, back_s, flight), upper_done in zip(arrivals, done_at, strict=True):
                load.free_at = upper_done
                found.finish[flight] = upper_done + back_s
        return found

    def _those(self, nodes: Sequence[Node] | None, of: Callable[[Tier], bool]) -> list[tuple[str, _Known]]:
        if nodes is not None:
            return [(node.node_id, self._known(node)) for node in nodes]
        return [(node_id, known) for node_id, known in self._nodes.items() if of(known.tier)]

    def _flights(self, node_id: str) -> list[Attempt]:
        """The attempts that an end device computes or passes on, or that an upstream node is asked first for, while
        their answers are to come."""
        attempts = self._ledger.assigned.at(node_id)
        return [each for each in attempts if each.in_flight and node_id not in each.facts.nodes[2:]]

    # --- estimates ------------------------------------------------------------------------------------------------

    def _known(self, node: Node) -> _Known:
        """Return what is known of a node. If the node has started again and measured itself again, its estimates start
        again."""
        prior = node.ms_per_image / 1000
        known = self._nodes.get(node.node_id)
        if known is None:
            known = self._nodes[node.node_id] = _Known(node.tier, Estimate(prior=prior))
        elif known.speed.prior != prior:
            known.speed, known.joins = Estimate(prior=prior), 1
        return known

    def _hop_s(self, end: str, now: float) -> float:
        known = self._nodes.get(end)
        return self._hop_prior_s if known is None or known.way is None else known.way.value(now)

    def _link_s(self, end: str, upper: str, now: float) -> float:
        known = self._nodes[upper]
        link = self._links.get((end, upper)) or known.way or self._ways.get(known.tier)
        return self._link_prior_s[known.tier] if link is None else link.value(now)


def _learn_speed(known: _Known, timing: Timing, images: int, now: float) -> None:
    if timing.batch_images:
        # Bounded, since it is never forgotten: no more tasks than a node gets.
        known.joins = max(known.joins, min(timing.batch_images // images, _MOST_TASKS))
        known.speed = known.speed.observe(timing.compute_s / timing.batch_images, now, may_change=True)
