"""All-reduce among members that come and go, by torchft. A step counts once the present members have agreed on it, and
a member that comes back gets the weights of the others.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tierkit.errors import Conflict, MissingExtra, SetupError, UpstreamUnavailable
from training.parallel.allreduce import scaled_rate
from training.parallel.exchange import Done
from training.parallel.group import first_line
from training.parallel.meeting import address_towards, choose_interface, differences
from training.parallel.rank import RankRun
from training.strategies.config import ExchangeConfig
from training.units import Flat

__all__ = ["LIGHTHOUSE_VARIABLE", "lighthouse", "run_member"]

log = logging.getLogger(__name__)

LIGHTHOUSE_VARIABLE = "TORCHFT_LIGHTHOUSE"
"""URL of the lighthouse, which knows what members there are."""
_EXCHANGE_S = 10.0
"""Budget of an exchange; then the member that is missing is left out."""
_DEAD_MS, _JOIN_MS, _TICK_MS = 600, 10_000, 20
_LOOK_S = 0.05


@contextmanager
def lighthouse() -> Iterator[str]:
    """A lighthouse in this process; its URL.

    Raises:
        MissingExtra: torchft is not installed.
    """
    server = _torchft().coordination.LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=1,
        join_timeout_ms=_JOIN_MS,
        quorum_tick_ms=_TICK_MS,
        heartbeat_timeout_ms=_DEAD_MS,
    )
    try:
        yield f"http://127.0.0.1:{server.address().rpartition(':')[2]}"
    finally:
        server.shutdown()


def run_member(run: RankRun) -> dict[str, Any] | None:
    """Train to the end; the result, at rank 0.

    Raises:
        MissingExtra: torchft is not installed.
        SetupError: no lighthouse is named.
        Conflict: the others train something else, or the run was stopped.
        UpstreamUnavailable: the lighthouse is away.
    """
    if LIGHTHOUSE_VARIABLE not in os.environ:
        raise SetupError(
            f"an elastic run needs a lighthouse: start 'torchft_lighthouse --min_replicas 1 --join_timeout_ms "
            f"{_JOIN_MS} --heartbeat_timeout_ms {_DEAD_MS}' on one machine, and set {LIGHTHOUSE_VARIABLE} to its URL"
        )
    with run.folder_locked(), _Member(run).running() as member:
        reports = run.reports(run.totals.run, member.stop)
        with reports.sent(run.options.scheduler if run.place.rank == 0 else None):
            member.train()
            if member.stopped:
                raise run.stopped
            if run.place.rank == 0:
                reports.result = run.result([run.totals], {"repeated_steps": float(member.repeated)})
            return reports.result


class _Member:
    def __init__(self, run: RankRun) -> None:
        self._run = run
        self.repeated = 0
        """Steps that were computed again, since a member was lost in the middle of them."""
        self.stopped = self._wants_stop = False
        self._manager: Any = None

    @contextmanager
    def running(self) -> Iterator[_Member]:
        """Meanwhile the lighthouse knows this member."""
        run, torchft = self._run, _torchft()
        url = os.environ[LIGHTHOUSE_VARIABLE]
        here = address_towards(url)
        choose_interface(here)
        store = dist.TCPStore(here, 0, is_master=True, wait_for_workers=False)
        budget = timedelta(seconds=run.options.patience_s)
        start, rank = run.kept.newest()  # all are the same
        run.continue_from(start, rank)
        group = torchft.process_group.ProcessGroupGloo(timeout=timedelta(seconds=_EXCHANGE_S))
        try:
            self._manager = torchft.Manager(
                pg=group,
                load_state_dict=self._load,
                state_dict=self._state,
                min_replica_size=1,
                use_async_quorum=False,
                timeout=timedelta(seconds=_EXCHANGE_S),
                quorum_timeout=budget,
                connect_timeout=budget,
                rank=0,
                world_size=1,
                store_addr=here,
                store_port=store.port,
                lighthouse_addr=url,
                replica_id=f"rank-{run.place.rank}",
                hostname=here,
            )
        except (RuntimeError, TimeoutError) as error:
            raise UpstreamUnavailable(f"the lighthouse at {url} does not answer: {first_line(error)}") from error
        self._manager.load_state_dict({"step": start, "batches_committed": run.totals.updates})
        try:
            yield self
        finally:
            group.abort()  # or the others wait for this member until the budget is spent
            self._manager.shutdown(wait=False)

    def stop(self) -> None:
        """Ask all members to end the run now."""
        self._wants_stop = True

    def train(self) -> None:
        """Compute until all steps have counted, or the run is stopped."""
        run, manager = self._run, self._manager
        learner, config, ranks = run.learner, run.strategy, run.place.ranks
        assert isinstance(config, ExchangeConfig)
        values, buffers = learner.lengths
        self._wait_for_all()
        step, rank = run.kept.newest()
        if manager.num_participants() == 1 and step > manager.current_step():  # the others have ended meanwhile
            run.continue_from(step, rank)
            manager.load_state_dict({"step": step, "batches_committed": run.totals.updates})
        run.begin()
        while (step := manager.current_step()) < run.steps and not self.stopped:
            gradient, loss = learner.gradient(step * ranks + run.place.rank)
            # Buffers too, so that all members are the same after each step.
            given = np.concatenate((gradient, learner.buffers(), [np.float32(self._wants_stop)]))
            tensor = torch.from_numpy(given)
            manager.allreduce(tensor).wait()
            if not manager.should_commit():
                self.repeated += 1
                self._agree()
                continue
            mean, present = tensor.numpy(), manager.num_participants()
            rate = scaled_rate(config, learner.rate(step * ranks), ranks=present, step=step, steps=run.steps)
            learner.apply(mean[:values], rate)
            if buffers:
                learner.load(learner.weights(), mean[values:-1])
            sent = 2 * (present - 1) * given.nbytes
            run.totals.updates += present - 1  # and this rank's own
            run.progress.ranks = present
            run.spend(run.totals.bytes_sent + sent, run.totals.bytes_received + sent)
            run.stepped(Done(step, loss))
            self.stopped = bool(mean[-1] > 0)
            self._agree()  # after the last step as well: one that is behind gets the final weights
        run.progress.step = manager.current_step()
        if run.progress.step not in run.kept.steps():  # it was behind
            run.kept.save(run.progress.step, learner, run.totals, {})

    def _wait_for_all(self) -> None:
        """Agree on the members of the first step; after the budget, it begins with those that are there."""
        run, manager = self._run, self._manager
        deadline, start = time.monotonic() + run.options.patience_s, manager.current_step()
        # A run that continues begins with two: those that come later get their weights.
        enough = min(run.place.ranks, 2) if start else run.place.ranks
        while True:
            self._agree()
            present = manager.num_participants()
            if manager.current_step() > start or present >= enough or start >= run.steps:
                return
            spent = torch.tensor([float(time.monotonic() > deadline)])  # all begin when one has waited for so long
            manager.allreduce(spent).wait()
            if spent.item() > 0 and manager.errored() is None:
                log.warning("%d of %d ranks came: the run begins without the others", present, run.place.ranks)
                return
            time.sleep(_LOOK_S)

    def _agree(self) -> None:
        """Agree on the members of the next step. A member that is behind gets the others' state.

        Raises:
            UpstreamUnavailable: the lighthouse is away.
        """
        try:
            self._manager.start_quorum()
        except (RuntimeError, TimeoutError) as error:
            raise UpstreamUnavailable(f"the lighthouse has gone: {first_line(error)}") from error

    def _state(self) -> dict[str, Any]:
        learner, totals = self._run.learner, self._run.totals
        vectors = {"joined": learner.joined(), "momentum": learner.momentum()}
        counted = {"updates": totals.updates, "bytes_sent": totals.bytes_sent, "bytes_received": totals.bytes_received}
        return {name: torch.from_numpy(each) for name, each in vectors.items()} | {
            "facts": dict(self._run.facts),
            "totals": counted,
            "stopped": self.stopped,
        }

    def _load(self, state: dict[str, Any]) -> None:
        """Raises Conflict where the others train something else."""
        if different := differences([state["facts"], self._run.facts]):
            raise Conflict(f"this member does not fit to the others: {different.replace('rank 1', 'this member')}")
        learner, totals = self._run.learner, self._run.totals
        learner.load_joined(_vector(state["joined"]))
        learner.load_momentum(_vector(state["momentum"]))
        for name, value in state["totals"].items():
            setattr(totals, name, value)
        self.stopped = state["stopped"]
        log.info("got the weights of the others")


def _vector(tensor: torch.Tensor) -> Flat:
    found: Flat = tensor.cpu().numpy()
    return found


def _torchft() -> Any:
    os.environ.setdefault("RUST_LOG", "warn")  # or each step of each member is logged
    for name in ("torchft", "torchft_quorums", "torchft_commits", "torchft_errors"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        import torchft
        import torchft.coordination
    except ImportError as error:
        raise MissingExtra("elastic", "members that come and go") from error
    return torchft
