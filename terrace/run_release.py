"""A finished training run as a model set: network, encoder, temperature, thresholds. Each step that is done stays done.

The state of the work is `release.json` in the run folder. Needs the extra `train`.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from encryption.conv1 import add_conv1
from models.dataset import Dataset
from models.escalation import Tuning
from models.export.pipeline import quantize_run
from models.manifest import (
    MANIFEST_NAME,
    Manifest,
    ModelEntry,
    begin_weights,
    load_manifest,
    parse_manifest,
    records_folder,
    save_manifest,
    weights_folder,
)
from models.training.checkpoint import CHECKPOINT, Checkpoint, read_checkpoint
from models.training.config import TrainConfig
from models.training.record import TrainingRecord, read_record, unfinished
from models.tuning import TuningTarget, tune_weights
from tierkit.atomic import alone_in, made_folder, write_atomically
from tierkit.client import Client
from tierkit.documents import Frozen, read_json
from tierkit.errors import DataError, SetupError, WeightsError
from training.messages import SPEC, RunSpec

__all__ = ["Base", "MadeSet", "base_of", "check_run", "make_set"]

_STATE, _RECORD = "release.json", "record.json"
Step = Literal["begun", "network", "encoder", "thresholds"]
Say = Callable[[str], None]


class _State(Frozen):
    """The work as it was when its last step ended."""

    checkpoint: str
    """Its sha256."""
    base: str
    """Digest of the manifest that the set began with; "" for an empty set."""
    folder: str
    done: tuple[Step, ...]
    manifest: str = ""
    """Digest of the set's manifest, once it is complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """The model set that a new one begins with."""

    manifest: Manifest
    copy_to: Callable[[Path], None]
    """Makes the folder a copy of it, or raises a `TerraceError` and leaves no folder."""
    records: Path | None = None
    """Folder of the training records of its networks, if the copy lacks them: a scheduler keeps none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeSet:
    """A model set with the network of a run."""

    folder: Path
    network: ModelEntry
    tuning: Tuning | None
    """None for a set without two tiers."""


def base_of(models: Path | None, client: Client | None, records: Path | None = None) -> Base:
    """Return the release in force of a scheduler, otherwise the model set of a folder, otherwise the bundled one.

    Raises:
        WeightsError: the set is missing or damaged.
        TerraceError: the scheduler does not answer.
    """
    if client is None or models is not None:
        source = models or weights_folder()
        return Base(
            manifest=load_manifest(source),
            copy_to=lambda folder: _discard(begin_weights(folder, source)),
            records=records,
        )
    manifest = parse_manifest(_manifest_of(client), f"of {client.url}")
    return Base(manifest=manifest, copy_to=lambda folder: _download(client, manifest, folder), records=records)


def _manifest_of(client: Client) -> bytes:
    """The manifest of the release in force, as JSON."""
    return json.dumps(client.models()).encode()


def check_run(run: Path, *, may_be_unfinished: bool) -> TrainingRecord:
    """Return the record of a run folder.

    Raises:
        WeightsError: it is not a run, has not finished or has no record; the message explains what to do.
    """
    if not (run / CHECKPOINT).is_file():
        ranks = sorted(path.parent.name for path in run.glob(f"rank-*/{CHECKPOINT}"))
        if ranks:
            raise WeightsError(f"{run} has a network for each rank: name one of them, such as {run / ranks[0]}")
        if (run / SPEC).is_file():
            if read_json(run / SPEC, RunSpec, what="run", error=WeightsError).own is not None:
                raise WeightsError(
                    f"{run} is the run of an improvement, whose release `terrace train improve` makes: give that "
                    "command again"
                )
            raise WeightsError(
                f"the run in {run} has not finished: start its host again with this --folder, and let it end"
            )
        raise WeightsError(f"{run} is not the folder of a training run: it has no {CHECKPOINT}")
    if not (run / _RECORD).is_file():
        how = (
            "move result.json away and start the host again with this --folder: it writes the record and ends"
            if (run / SPEC).is_file()
            else "start the command that trained it again with the same options: it continues from the checkpoint and "
            "writes the record"
        )
        raise WeightsError(f"{run} has no {_RECORD}, which says how the network was made: {how}")
    if (what := unfinished(run)) and not may_be_unfinished:
        raise WeightsError(f"{what}: let it finish, or release it as it is with --unfinished")
    return read_record(TrainingRecord, run)


def make_set(run: Path, dataset: Dataset, out: Path, base: Base, say: Say) -> MadeSet:
    """Make the model set of a run, or finish what an earlier call has begun.

    Args:
        run: checked by `check_run`.
        out: folder of the set. It must be new, empty, or made by an earlier call for this run.

    Raises:
        SetupError: the folder holds something else, or could not be written.
        WeightsError: the run does not fit the data set, or a training record is missing.
        DataError: the images are missing or not those that the run was trained on.
    """
    checkpoint = read_checkpoint(run)
    assert checkpoint is not None
    _check_images(checkpoint, dataset)
    name = checkpoint.configured(TrainConfig).name
    with alone_in(run, otherwise=f"another process works in {run}: let it end"):
        work = _begin(run, dataset, out, base, say)
        place = records_folder(out)
        if work.missing("network"):
            say(f"exporting and quantising {name}")
            quantize_run(run, dataset, out, records=place, own_name=False, say=say)
            work.finish("network")
        network = load_manifest(out).entry(name)
        if network.target == "fine" and work.missing("encoder"):
            say("cutting its encoder off")
            add_conv1([name], out, dataset, place)
            work.finish("encoder")
        tiers = {entry.tier for entry in load_manifest(out).models}
        tuning = None
        if len(tiers) < 2:
            say(f"the set has one tier ({network.tier}), so there are no thresholds to choose")
        else:
            tuned = out / "escalation.json"
            if work.missing("thresholds") or not tuned.is_file():
                say("choosing thresholds")
                _add_records(base, place)
                tune_weights(out, dataset, place, TuningTarget(accuracy=0.99, relative=True, budget=0.5))
                work.finish("thresholds")
            tuning = read_json(tuned, Tuning, what="thresholds", error=WeightsError)
        work.complete()
    return MadeSet(folder=out, network=network, tuning=tuning)


@dataclass(slots=True)
class _SetInProgress:
    """The state in the run folder."""

    path: Path
    state: _State

    def missing(self, step: Step) -> bool:
        return step not in self.state.done

    def finish(self, step: Step) -> None:
        self.keep(self.state.model_copy(update={"done": (*self.state.done, step)}))

    def complete(self) -> None:
        self.keep(self.state.model_copy(update={"manifest": load_manifest(Path(self.state.folder)).digest}))

    def keep(self, state: _State) -> None:
        self.state = state
        write_atomically(self.path, state.model_dump_json(indent=1).encode())


def _begin(run: Path, dataset: Dataset, out: Path, base: Base, say: Say) -> _SetInProgress:
    """Continue with the folder of an earlier call if run and base are the same; otherwise begin a new set."""
    fits = base.manifest.hierarchy == dataset.hierarchy
    if not fits:
        say(f"the set begins empty, because {base.manifest.hierarchy.name!r} has other classes")
    wanted = _State(
        checkpoint=hashlib.sha256((run / CHECKPOINT).read_bytes()).hexdigest(),
        base=base.manifest.digest if fits else "",
        folder=str(out.resolve()),
        done=("begun",),
    )
    path = run / _STATE
    known = read_json(path, _State, what="state of a release", error=SetupError) if path.is_file() else None
    ours = known is not None and known.folder == wanted.folder
    if known is not None and ours and known.checkpoint == wanted.checkpoint and out.is_dir():
        # A set that is complete and in force by now is its own base.
        begun = (out / MANIFEST_NAME).is_file() or not fits
        if begun and (known.base == wanted.base or (known.manifest and known.manifest == base.manifest.digest)):
            return _SetInProgress(path, known)
    if out.exists() and any(out.iterdir()):
        if not ours:
            raise SetupError(f"{out} holds something else: name a new folder with --out")
        shutil.rmtree(out)
    work = _SetInProgress(path, wanted)
    work.keep(wanted)  # from here on the folder is known as ours
    if fits:
        base.copy_to(out)
    else:
        made_folder(out)  # the network's entry begins the manifest
    return work


def _check_images(checkpoint: Checkpoint, dataset: Dataset) -> None:
    if checkpoint.data_sha256 != dataset.read("train").digest():
        raise DataError(
            f"the run was trained on other images than {dataset.name!r} has: name its data set with --dataset"
        )


def _download(client: Client, manifest: Manifest, folder: Path) -> None:
    """Copy the networks of a release from its scheduler; whole or not at all."""
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    made_folder(part)
    files = [manifest.weights(entry.name) for entry in manifest.models]
    files += [encoder.weights(side) for encoder in manifest.encoders for side in encoder.own_files]
    for each in files:
        client.download_network(each.name, each.sha256, part / each.file)
    save_manifest(manifest, part)
    part.replace(folder)


def _add_records(base: Base, records: Path) -> None:
    """Copy the training records that a set lacks, from the user's folder and from Terrace's own set."""
    bundled = {entry.sha256 for entry in load_manifest().models}
    known = [base.records] if base.records is not None else []
    if any(entry.sha256 in bundled for entry in base.manifest.models):
        known.append(records_folder(weights_folder()))
    made_folder(records)
    for path in (path for folder in known for path in sorted(folder.glob("*.json"))):
        if not (records / path.name).exists():
            write_atomically(records / path.name, path.read_bytes())


def _discard(_: object) -> None:
    return None
