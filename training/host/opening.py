"""Opens a host from its settings, with a new run or with one that continues from its folder."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from pydantic import BaseModel, ValidationError

from models.dataset import Dataset
from models.training.config import TrainConfig, find_config
from models.training.run import initial_weights
from tierkit.atomic import write_atomically
from tierkit.documents import read_json
from tierkit.errors import InvalidInput, MalformedMessage, SetupError, TerraceError
from training.data.segments import cut, opened
from training.host.host import Host, HostParts
from training.host.journal import Journal
from training.host.run import TrainingRun
from training.host.settings import HostSettings
from training.host.sharing import Sharing
from training.learner import FlatLearner, read_images, read_teacher
from training.messages import SPEC, RunSpec
from training.strategies.build import build_strategy
from training.strategies.config import BatchConfig
from training.strategies.finding import find_hosted
from training.strategies.lbfgs import check_lbfgs

__all__ = ["dataset_of", "find_network", "keep_spec", "kept_spec", "open_host", "restored"]

_SEGMENTS = "segments"


def find_network(name: str) -> TrainConfig:
    """The bundled configuration of this name, or the one of a TOML file.

    Raises:
        InvalidInput: there is none.
        SetupError: the file cannot be read, or what is wrong in it.
    """
    path = Path(name)
    return find_config(path.stem, path) if path.suffix == ".toml" else find_config(name, None)


def open_host(settings: HostSettings) -> Host:
    """The run of the settings' folder, or a new one there.

    Raises:
        SetupError: the folder, the data or the configuration cannot be used, or it holds another run.
    """
    try:
        network, strategy = find_network(settings.network or ""), find_hosted(settings.strategy)
    except InvalidInput as error:
        raise SetupError(str(error)) from error
    changes: dict[str, float | None] = {"epochs": settings.epochs, "seed": settings.seed}
    changes |= {"peak_rate": settings.rate, "batch_size": settings.batch_size}
    network = network.model_copy(update={name: value for name, value in changes.items() if value is not None})
    if isinstance(strategy, BatchConfig):
        try:
            check_lbfgs(network, settings.wire, shares_data=settings.share_data)
        except InvalidInput as error:
            raise SetupError(str(error)) from error
    folder = settings.run_folder
    if any(folder.glob("rank-*-*.safetensors")):
        raise SetupError(f"{folder} holds a run of ranks: give another --folder")
    journal = Journal(folder)
    try:
        dataset = dataset_of(settings, network)
        answers = read_teacher(settings.answers, network, dataset)
        training, test = read_images(network, dataset, answers=answers, begins=True)
        learner = FlatLearner(network, training, strategy=strategy)
        if network.initial is not None:
            learner.begin_with(initial_weights(network, settings.runs / network.initial, dataset))
        weights, buffers = learner.weights(), learner.buffers()
        wanted = RunSpec(
            id=secrets.token_hex(16),
            network=network,
            choice=Path(settings.strategy).stem,
            strategy=strategy,
            workers=settings.workers,
            wire=settings.wire,
            values=len(weights),
            buffers=len(buffers),
            data_sha256=training.sha256,
            answers_sha256=None if answers is None else answers.digest,
            lease_s=settings.lease_s,
        )
        spec = kept_spec(folder, wanted)
        start = weights, buffers
        run = TrainingRun(build_strategy(spec.strategy, start, learner, workers=spec.workers, lease_s=spec.lease_s))
        started_at = restored(run, spec, journal, accept_loss=settings.accept_loss)
        keep_spec(folder, spec, begun=started_at > 0)
        trust = spec.strategy.trust
        checker = FlatLearner(network, training) if trust is not None and trust.recheck else None
        sharing = None
        if settings.share_data:
            segments = folder / _SEGMENTS
            manifest = opened(segments, spec.data_sha256, spec.answers_sha256)
            if manifest is None:
                manifest = cut(dataset, training, network, spec.workers + 1, segments)
            sharing = Sharing(manifest, segments, batch=network.batch_size, wait_s=settings.max_lease_wait_s)
    except TerraceError as error:
        journal.close()
        raise error if isinstance(error, SetupError) else SetupError(str(error)) from error
    return Host(
        HostParts(
            spec=spec,
            run=run,
            journal=journal,
            learner=learner,
            test=test,
            dataset=dataset.name,
            checker=checker,
            started_at=started_at,
            max_lease_wait_s=settings.max_lease_wait_s,
            sharing=sharing,
            until=settings.until,
            start_at=settings.start_at,
        )
    )


def dataset_of(settings: HostSettings, network: TrainConfig) -> Dataset:
    """Data set of the settings or, by default, of the network's configuration."""
    data = settings.data or (Path(os.environ["TERRACE_DATA"]) if "TERRACE_DATA" in os.environ else None)
    return Dataset.open(settings.dataset or network.dataset, data)


def _different(one: BaseModel, other: BaseModel) -> list[str]:
    """Fields with other values."""
    return [name for name in type(one).model_fields if getattr(one, name) != getattr(other, name)]


def kept_spec(folder: Path, wanted: RunSpec) -> RunSpec:
    """The run that a folder holds, which must be the wanted one; that one if there is none."""
    path = folder / SPEC
    if not path.exists():
        return wanted
    kept = read_json(path, RunSpec, what="run", error=SetupError)
    asked = wanted.model_copy(update={"id": kept.id, "lease_s": kept.lease_s})
    if asked != kept:
        of_run = (name for name in _different(asked, kept) if name != "network")
        different = [*_different(asked.network, kept.network), *of_run]
        raise SetupError(
            f"{folder} holds another run, with other values of {', '.join(different)}: "
            "give the same as before, or another --folder"
        )
    return kept


def keep_spec(folder: Path, spec: RunSpec, *, begun: bool) -> None:
    """Write what a new run trains.

    Raises:
        SetupError: the run has begun before, and this is missing.
    """
    if not (folder / SPEC).exists():
        if begun:
            raise SetupError(
                f"{folder} holds a run, and its {SPEC} is missing: bring that back from a copy, or give another "
                "--folder"
            )
        write_atomically(folder / SPEC, spec.model_dump_json(indent=1).encode())


def restored(run: TrainingRun, spec: RunSpec, journal: Journal, *, accept_loss: bool) -> float:
    """Bring a run to where its journal ends; the time on its clock then."""
    state = journal.load()
    if state is None:
        vectors, figures = run.state()
        journal.begin((vectors, figures | {"now": 0.0}))
        return 0.0
    vectors, figures = state
    now = float(figures.pop("now"))
    try:
        run.restore(vectors, figures)
        for call, body in journal.calls(accept_loss=accept_loss):
            now = call["now"]
            run.repeat(call, body, spec)
    except (KeyError, TypeError, ValueError, ValidationError, MalformedMessage) as error:
        raise SetupError(
            f"{journal.folder} holds a run that this version of Terrace cannot continue ({error}): "
            "start over in another --folder"
        ) from error
    return now
