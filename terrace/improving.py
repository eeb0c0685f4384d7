"""The way from a release to a better one, in steps: each step is done once, and its result is in a folder.

The folder holds `improve.json` (options and state), `base/` (model set of the release), `plan/`
(what workers train), `run/` (the host's run), `network.onnx` (the chosen network) and `set/` (the improved model set).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from json import dumps
from pathlib import Path
from typing import Any

from models.dataset import Dataset
from models.escalation import save_tuning
from models.folders import Labelled
from models.manifest import Manifest, ModelEntry, load_manifest, parse_manifest, save_manifest
from models.tuning import TuningTarget, tuned_on
from terrace.improve_judging import (
    ComparedPictures,
    TrainedNetwork,
    TriedNetwork,
    as_compared,
    check_pictures,
    contradicted,
    tried,
    with_answers,
)
from terrace.improve_progress import ProgressLines, progress_line
from terrace.improve_state import ImproveState, ImproveWish
from terrace.newest_answers import newest_answers
from terrace.stoppable import terminable
from tierkit.atomic import alone_in, write_atomically
from tierkit.client import Client, Run
from tierkit.documents import read_json
from tierkit.errors import (
    Conflict,
    DeadlineExceeded,
    Forbidden,
    InvalidInput,
    ServiceFailed,
    SetupError,
    TerraceError,
    WeightsError,
)
from tierkit.wire.learning import ImprovementState
from tierkit.wire.releases import ReleaseState
from training.improve.base import WEIGHTS, read_weights
from training.improve.blend import SHARES, best
from training.improve.plan import Plan, fitted_to, training_of, write_plan
from training.improve.successor import answers_of, entry_to_improve, successor, write_set
from training.messages import RESULT, SPEC, RunSpec
from training.own_data import OwnData
from training.processes import Started, flags_of, started_processes

__all__ = ["IMPROVED", "STATE", "Goal", "Improving"]

IMPROVED = "network.onnx"
STATE = "improve.json"
_BASE, _PLAN, _RUN, _SET = "base", "plan", "run", "set"
_HOST = (sys.executable, "-P", "-m", "terrace", "train", "host")
_LOOK_S = 5.0
"""Seconds between two looks at the run."""
_CONTINUES = "the same command continues"
_NEWEST = " on the newest answers from above"
_TARGET = TuningTarget(accuracy=0.99)
"""The default of `terrace models tune-escalation`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """The options that may change from start to start."""

    validation: str | None = None
    """Name or folder of labelled pictures that no network was trained on."""
    data: Path | None = None
    """Folder of the data sets that have names."""
    release: bool = True
    """False to stop with the model set."""
    trial: dict[str, Any] = field(default_factory=dict)
    """Arguments of `Client.start_release`."""
    host: dict[str, object] = field(default_factory=dict)
    """Settings of the host, by the names of its flags."""
    within_s: float = 86_400.0
    """Time for the training of this start of the command."""
    say: Callable[[str], None] = lambda text: None
    told: Callable[[ImproveState], None] = lambda outcome: None
    """Called when something has changed."""


class Improving:
    """An improvement in a folder.

    Raises:
        InvalidInput: the folder holds another improvement.
        SetupError: the folder cannot be used.
    """

    def __init__(self, client: Client, folder: Path, wish: ImproveWish, goal: Goal) -> None:
        self._client, self._folder, self._wish, self._goal = client, folder, wish, goal
        self._found()

    def _found(self) -> ImproveState | None:
        """The state that the folder holds; None if it holds none."""
        if not (self._folder / STATE).exists():
            return None
        found = read_json(self._folder / STATE, ImproveState, what="state of an improvement", error=SetupError)
        names = ImproveWish.model_fields
        if different := [name for name in names if getattr(found.wish, name) != getattr(self._wish, name)]:
            raise InvalidInput(
                f"{self._folder} holds an improvement with other values of {', '.join(different)}: give the same as "
                "before, or another --folder"
            )
        return found

    def run(self) -> ImproveState:
        """Do what is left to do. Another command with this folder waits for nothing and changes nothing.

        Raises:
            SetupError: another command is at work in the folder.
            Conflict: another release rolls out, or this one is not in force.
            InvalidInput: the release cannot be improved, or there is nothing to tune its thresholds on.
            DeadlineExceeded: the training takes longer than it may.
            Forbidden: the caller wants a release, and has not the role for it.
            ServiceFailed: the host of the run has ended with an error, or was killed.
        """
        busy = f"another command is at work in {self._folder}: wait for its end, or give another --folder"
        with alone_in(self._folder, otherwise=busy), terminable():
            return self._continued(self._found() or self._prepare())

    def _continued(self, outcome: ImproveState) -> ImproveState:
        try:
            if outcome.passes is None:
                self._train(outcome)
                self._judge(outcome)
            if outcome.passes and outcome.state != "released":
                if outcome.state != "evaluating":
                    self._tell(outcome, state="evaluating", reason=outcome.verdict)
                self._make_set(outcome)
                if self._goal.release:
                    self._release(outcome)
                else:
                    self._ended(outcome, "paused", f"no release was wanted: {outcome.verdict}")
        except (TerraceError, KeyboardInterrupt) as error:
            self._ended(outcome, *_end_of(error))
            raise
        return outcome

    def _ended(self, outcome: ImproveState, state: ImprovementState, reason: str) -> None:
        """Tell that the command ends. What cannot be told now does not hide the error that ends it."""
        with contextlib.suppress(TerraceError):  # of a full disk, or of a caller who may not tell
            self._tell(outcome, state=state, reason=reason)

    # --- the release, and the plan ---

    def _prepare(self) -> ImproveState:
        """Fetch the release, write the plan, and begin."""
        wish, folder = self._wish, self._folder
        strategy, together = fitted_to(wish.strategy, wish.devices)
        now = self._client.release(wish.release)
        self._check_free(now.number)
        if now.thresholds and self._goal.validation is None:
            raise InvalidInput(
                f"{now.release} has tuned thresholds, which do not fit an improved network: give labelled pictures "
                "with --validation, and they are tuned again"
            )
        manifest = parse_manifest(dumps(self._client.release_manifest(now.release)).encode(), f"of {now.release}")
        entry = entry_to_improve(manifest, wish.tier)
        if self._goal.validation is not None:
            check_pictures(self._validation(manifest, entry))
        self._goal.say(f"fetching the networks of {now.release}")
        base = folder / _BASE
        _make(base)
        for name, file, sha256 in _files(manifest):
            self._fetch(base / file, name, sha256)
        save_manifest(manifest, base)
        content = (base / entry.file).read_bytes()
        own = OwnData.of(
            entry,
            content,
            manifest.hierarchy,
            release=now.release,
            layers=wish.layers,
            least_confidence=wish.least_confidence,
        )
        steps = wish.rounds * together * strategy.period
        network = training_of(entry, steps=steps, batch=wish.batch, rate=wish.rate, mirror=wish.mirror)
        _make(folder / _PLAN)
        plan = Plan(own=own, network=network, choice=wish.choice, strategy=strategy)
        write_plan(folder / _PLAN, plan, content)
        outcome = ImproveState(id=secrets.token_hex(16), wish=wish, created_at=datetime.now(UTC))
        self._tell(outcome)
        return outcome

    def _check_free(self, number: int) -> None:
        """Raises Conflict if a release rolls out, or the release of this number is not in force."""
        found = self._client.releases()
        if (rollout := found.rollout) is not None:
            raise Conflict(
                f"{rollout.release} is {rollout.state.value} now: improve a release when that has ended "
                f"(terrace models release show {rollout.release})"
            )
        if number != int(found.in_force.rpartition("@")[2]):
            raise Conflict(f"{found.in_force} is in force, and only the release in force can be improved")

    def _fetch(self, path: Path, name: str, sha256: str) -> None:
        if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == sha256:
            return
        try:
            self._client.save_network(path, name, sha256)
        except OSError as error:
            raise SetupError(
                f"cannot write {path}: {error.strerror}; make room there, and give the command again"
            ) from error
        if hashlib.sha256(path.read_bytes()).hexdigest() != sha256:
            raise WeightsError(f"the scheduler has sent another file than {name} with sha256 {sha256}")

    # --- training ---

    def _train(self, outcome: ImproveState) -> None:
        if (self._folder / _RUN / RESULT).exists():
            return
        self._tell(outcome, state="training", reason="")
        asyncio.run(self._hosted(outcome))

    async def _hosted(self, outcome: ImproveState) -> None:
        """Let a host train; workers find it through the scheduler."""
        folder = self._folder
        flags = flags_of(
            {
                "port": 0,
                **self._goal.host,
                "base": folder / _PLAN,
                "folder": folder / _RUN,
                "workers": outcome.wish.devices,
            }
        )
        self._goal.say("starting the host of the run")
        async with started_processes(lambda name, line: self._goal.say(line), lambda name, pid: None) as start:
            host = await start("host", [*_HOST, *flags])
            await self._until_over(host, outcome)
        if (code := host.process.returncode or 0) < 0:
            raise ServiceFailed(f"{host.failure}: {_CONTINUES}", code=code)
        if code > 0:
            raise host.failure
        if not (folder / _RUN / RESULT).exists():
            raise Conflict(f"the training was stopped before its end: {_CONTINUES} it")

    async def _until_over(self, host: Started, outcome: ImproveState) -> None:
        """Wait for the end of the host, and tell from time to time how far it is. Raises DeadlineExceeded."""
        clock, lines = asyncio.get_running_loop().time, ProgressLines(self._goal.say)
        end = clock() + self._goal.within_s
        while (left_s := end - clock()) > 0:
            done, _ = await asyncio.wait({host.watcher}, timeout=min(_LOOK_S, left_s))
            if done:
                return
            await asyncio.to_thread(self._look, outcome, lines)
        raise DeadlineExceeded(
            f"the training is not done after {self._goal.within_s:,.0f} s: are workers running (terrace train "
            f"work --scheduler URL --kept FOLDER)? If they are, {_CONTINUES}"
        )

    def _look(self, outcome: ImproveState, lines: ProgressLines) -> None:
        """Tell how far the training is, if the scheduler knows the run now."""
        run = self._run()
        if run is not None:
            lines.news(progress_line(run, outcome.wish.rounds))
            self._tell(outcome, devices=_brought(run))

    def _run(self) -> Run | None:
        """The run, as the scheduler knows it; None if it does not know it now."""
        with contextlib.suppress(TerraceError):
            spec = read_json(self._folder / _RUN / SPEC, RunSpec, what="run", error=SetupError)
            return self._client.run(spec.id)
        return None

    # --- judgement ---

    def _judge(self, outcome: ImproveState) -> None:
        """Choose how far to go from the present network to the trained one, and whether that may become a release."""
        run = self._run()
        self._tell(outcome, state="evaluating", reason="", devices=0 if run is None else _brought(run))
        manifest = load_manifest(self._folder / _BASE)
        entry = entry_to_improve(manifest, outcome.wish.tier)
        weights = read_weights(self._folder / _RUN / WEIGHTS)
        if hashlib.sha256((self._folder / _RUN / IMPROVED).read_bytes()).hexdigest() == entry.sha256:
            outcome.passes = False
            self._tell(outcome, state="refused", reason="no weight has changed, so there is nothing to release")
            return
        newest = newest_answers(self._client, entry, manifest.hierarchy, self._wish.least_confidence)
        labelled = None
        if self._goal.validation is not None:
            labelled = as_compared(self._validation(manifest, entry), entry)
        self._goal.say(
            "comparing the networks" + ("" if labelled is None else " on the labelled pictures and") + _NEWEST
        )
        place = self._folder / _BASE
        compared_on = ComparedPictures(
            newest=with_answers(newest, manifest, entry, place),
            labelled=None if labelled is None else with_answers(labelled, manifest, entry, place),
        )
        if (reason := contradicted(manifest, entry, compared_on.newest)) is not None:
            outcome.passes, outcome.verdict = False, reason
            self._tell(outcome, state="refused", reason=reason)
            return
        trained = TrainedNetwork(content=(place / entry.file).read_bytes(), layers=self._wish.layers, weights=weights)
        found = best(self._told_of(outcome, tried(manifest, entry, trained, share, compared_on)) for share in SHARES)
        write_atomically(self._folder / IMPROVED, found.content)
        outcome.passes, outcome.verdict = found.passes, found.verdict.reason
        self._tell(
            outcome,
            state="evaluating" if found.passes else "refused",
            reason=found.verdict.reason,
            figures={"share": found.share, **found.figures},
        )

    def _told_of(self, outcome: ImproveState, tried: TriedNetwork) -> TriedNetwork:
        """Say how a candidate compares; return it."""
        self._goal.say(f"candidate at {tried.share:.0%} of the way: {tried.verdict.reason}")
        self._tell(outcome)
        return tried

    def _validation(self, manifest: Manifest, entry: ModelEntry) -> Labelled:
        """The labelled pictures, as the network takes them."""
        assert self._goal.validation is not None
        dataset = Dataset.open(self._goal.validation, self._goal.data, hierarchy=manifest.hierarchy)
        manifest.check_hierarchy(dataset.hierarchy)
        return dataset.read_for(entry, "test")

    # --- the new release ---

    def _make_set(self, outcome: ImproveState) -> None:
        """Write the improved model set, if it is not there, with a new temperature and new thresholds."""
        folder, base = self._folder / _SET, self._folder / _BASE
        if (folder / _MADE).exists():
            return
        self._goal.say("making the improved model set")
        before = load_manifest(base)
        entry = entry_to_improve(before, outcome.wish.tier)
        content = (self._folder / IMPROVED).read_bytes()
        draft = successor(before, entry, content)
        manifest = write_set(base, folder, draft, content)
        if self._goal.validation is not None:
            labelled = self._validation(before, entry)
            judged = as_compared(labelled, entry)
            logits = answers_of(manifest, draft, folder, judged.images)
            final = successor(before, entry, content, fitted=[(logits, judged.labels)], measured=(logits, labelled))
            write_set(base, folder, final, content)
            if self._client.release(outcome.wish.release).thresholds:
                dataset = Dataset.open(self._goal.validation, self._goal.data, hierarchy=before.hierarchy)
                said = f"{dataset.name}: {len(labelled)} labelled pictures"
                tuning = tuned_on(folder, lambda each: dataset.read_for(each, "test"), _TARGET, data=said)
                save_tuning(tuning, folder)
        write_atomically(folder / _MADE, b"")

    def _release(self, outcome: ImproveState) -> None:
        """Make the release, and start its trial."""
        if outcome.new_release is None:
            self._check_free(self._number(outcome))
            self._goal.say("making the release")
            # A release of this name with the same content is returned as it is.
            made = self._client.create_release(outcome.wish.release.partition("@")[0], self._folder / _SET)
            self._tell(outcome, new_release=made.release)
        assert outcome.new_release is not None
        state = self._client.release(outcome.new_release).state
        if state in (ReleaseState.ROLLED_BACK, ReleaseState.STOPPED):
            self._tell(outcome, state="refused", reason=f"{outcome.new_release} has the same networks, and is {state}")
            return
        if state is ReleaseState.READY:
            self._check_free(self._number(outcome))
            self._goal.say(f"starting the trial of {outcome.new_release}")
            self._client.start_release(outcome.new_release, **self._goal.trial)
        self._tell(outcome, state="released", started=True, reason=outcome.verdict)

    def _number(self, outcome: ImproveState) -> int:
        return self._client.release(outcome.wish.release).number

    def _tell(self, outcome: ImproveState, **changes: Any) -> None:
        """Write what has changed, and tell who wants to hear of it.

        Raises:
            Forbidden: the caller may not make the release that is wanted.
        """
        for name, value in changes.items():
            setattr(outcome, name, value)
        _make(self._folder)
        write_atomically(self._folder / STATE, outcome.model_dump_json(indent=1).encode())
        try:
            self._goal.told(outcome)
        except Forbidden:
            if self._goal.release:  # who may not tell of an improvement may not make its release either
                raise
        except TerraceError:  # an older scheduler keeps no improvements, or it is away
            pass


def _end_of(error: BaseException) -> tuple[ImprovementState, str]:
    """The state and the reason of an improvement whose command ends with an error."""
    if isinstance(error, KeyboardInterrupt):
        return "paused", f"the command was stopped: {_CONTINUES}"
    if isinstance(error, InvalidInput | SetupError) and not isinstance(error, ServiceFailed):
        return "failed", str(error)
    return "paused", str(error) if _CONTINUES in str(error) else f"{error}; {_CONTINUES}"


def _brought(run: Run) -> int:
    """Number of devices that have brought updates."""
    return sum(each.updates > 0 for each in run.workers)


_MADE = ".made"
"""Name of a mark in the folder of the improved set, once the set is complete."""


def _files(manifest: Manifest) -> list[tuple[str, str, str]]:
    """Name to ask for, name of the file and sha256 of each file that a manifest names."""
    found = [(entry.name, entry.file, entry.sha256) for entry in manifest.models]
    for encoder in manifest.encoders:
        sides = (encoder.weights(side) for side in encoder.own_files)
        found += [(each.name, each.file, each.sha256) for each in sides]
    return found


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SetupError(f"cannot make the folder {folder}: {error.strerror}") from error
