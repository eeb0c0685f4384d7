"""Which tasks kill nodes. Pure; time is passed in."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from scheduler.devices.list import DeviceList
from scheduler.dispatch.attempt import Attempt
from scheduler.dispatch.retry import DeathLog, is_poison
from scheduler.dispatch.work import ActiveJob, ActiveTask
from tierkit.types import Health, Recovery

__all__ = ["Suspicion"]


class Suspicion:
    """The tasks that nodes have died with.

    A node whose process ends breaks the connection before anybody knows that it is dead, so tasks whose connection
    broke are remembered until the device list has made up its mind.
    """

    def __init__(self, devices: DeviceList) -> None:
        self._devices = devices
        self._broken: dict[tuple[str, str], dict[ActiveTask, ActiveJob]] = {}
        """By node and incarnation: unanswered tasks that it may have had when a connection to it broke."""
        self._deaths = DeathLog()
        self._down: set[str] = set()
        """Nodes whose present death is in the log."""

    def suspect(self, node_id: str, incarnation: str, job: ActiveJob, task: ActiveTask) -> None:
        """A connection broke while the node may have had the task."""
        if not (task.closed or job.ending) and incarnation:
            self._broken.setdefault((node_id, incarnation), {})[task] = job

    def note_death(self, node_id: str, attempts: Iterable[Attempt], now: float) -> None:
        """Write the death of a node into the log, with the tasks that it held."""
        if self._devices.find(node_id) is None or self._devices.keeps_tasks(node_id, now):
            self._down.discard(node_id)
        elif node_id not in self._down:
            self._down = {node_id, *(other for other in self._down if self._devices.find(other) is not None)}
            held = [
                attempt.task
                for attempt in attempts
                if node_id in (attempt.node_id, *(node.node_id for node in attempt.upstreams[:1]))
            ]
            held += [task for key, tasks in self._broken.items() if key[0] == node_id for task in tasks]
            self._deaths.add(now, [task.deaths for task in held])

    def judge(self, node_id: str, now: float) -> list[tuple[ActiveJob, ActiveTask]]:
        """The tasks with which a node has died, now that the device list has news of it."""
        died: list[tuple[ActiveJob, ActiveTask]] = []
        for key in [key for key in self._broken if key[0] == node_id]:
            view = self._devices.view_of(*key, now)
            if view is not None and view.health is not Health.ALIVE and view.keeps_tasks and not view.set_aside:
                continue  # not decided yet
            tasks = self._broken.pop(key)
            if view is None or not view.keeps_tasks:
                died += [(job, task) for task, job in tasks.items()]
        return died

    def poison(self, job: ActiveJob, task: ActiveTask, node_id: str, now: float) -> str:
        """Count a node's death against a task; returns why the task is given up, or "". Off the list by an operator's
        command is no death."""
        known = self._devices.find(node_id) is not None
        if job.policy.recovery is not Recovery.MONITOR or task.closed or job.ending or not known:
            return ""
        task.deaths.add(node_id)
        if not is_poison(task.deaths, self._deaths.unexplained(now)):
            return ""
        nodes = ", ".join(sorted(task.deaths))
        return f"{len(task.deaths)} nodes died or got stuck with it ({nodes}); no other gets it"

    def forget_job(self, job: ActiveJob) -> None:
        """The job is over: no death can be put down to its tasks."""
        self._keep(lambda other, _: other is not job)

    def forget_task(self, task: ActiveTask) -> None:
        """The task is over."""
        self._keep(lambda _, other: other is not task)

    def _keep(self, wanted: Callable[[ActiveJob, ActiveTask], bool]) -> None:
        for key, tasks in list(self._broken.items()):
            left = {task: job for task, job in tasks.items() if wanted(job, task)}
            if left:
                self._broken[key] = left
            else:
                del self._broken[key]
