"""A host for workers that train on the pictures which they have kept: it starts from a file, and has no images."""

from __future__ import annotations

import secrets

import numpy as np

from models.data import ImageSet
from models.training.config import TrainConfig
from tierkit.errors import SetupError, TerraceError
from training.host.host import Host, HostParts
from training.host.journal import Journal
from training.host.opening import keep_spec, kept_spec, restored
from training.host.run import TrainingRun
from training.host.settings import HostSettings
from training.improve.base import own_learner, own_training_data, read_base, worker_learner
from training.improve.plan import check_strategy, read_plan
from training.learner import FlatLearner
from training.messages import RunSpec
from training.own_data import OwnData
from training.strategies.build import build_strategy

__all__ = ["open_own_host", "without_pictures"]


def open_own_host(settings: HostSettings) -> Host:
    """The run of the plan in `settings.base`, or the run that its folder holds.

    Raises:
        SetupError: the plan, its network or the folder cannot be used, or the folder holds another run.
    """
    assert settings.base is not None
    plan, content = read_plan(settings.base)
    folder = settings.run_folder
    journal = Journal(folder)
    try:
        check_strategy(plan.strategy)
        own, network = plan.own, plan.network
        data = own_training_data(network, _blank(own, network), own.classes, sha256=own.sha256)
        learner = own_learner(read_base(content, own, network), network, data, strategy=plan.strategy)
        weights, buffers = learner.weights(), learner.buffers()
        spec = kept_spec(
            folder,
            RunSpec(
                id=secrets.token_hex(16),
                network=network,
                choice=plan.choice,
                strategy=plan.strategy,
                workers=settings.workers,
                wire=settings.wire,
                values=len(weights),
                buffers=len(buffers),
                data_sha256=own.sha256,
                lease_s=settings.lease_s,
                own=own,
            ),
        )
        strategy = build_strategy(
            spec.strategy, (weights, buffers), learner, workers=spec.workers, lease_s=spec.lease_s
        )
        run = TrainingRun(strategy)
        started_at = restored(run, spec, journal, accept_loss=settings.accept_loss)
        keep_spec(folder, spec, begun=started_at > 0)
    except TerraceError as error:
        journal.close()
        raise error if isinstance(error, SetupError) else SetupError(str(error)) from error
    return Host(
        HostParts(
            spec=spec,
            run=run,
            journal=journal,
            learner=learner,
            test=None,
            checker=None,
            started_at=started_at,
            max_lease_wait_s=settings.max_lease_wait_s,
            base=content,
            start_at=settings.start_at,
        )
    )


def without_pictures(spec: RunSpec, content: bytes) -> FlatLearner:
    """The learner of a machine that keeps the weights of such a run and trains on nothing itself.

    Raises:
        InvalidAnswer: see `worker_learner`.
    """
    assert spec.own is not None
    return worker_learner(spec, content, _blank(spec.own, spec.network))


def _blank(own: OwnData, config: TrainConfig) -> ImageSet:
    """One black picture. It shows that the network computes, and no worker learns it."""
    hierarchy = own.classes
    label = np.zeros(1, np.int64)
    return ImageSet(
        images=np.zeros((1, own.height, own.width, 3), np.uint8),
        fine=label,
        coarse=hierarchy.coarse_labels(label),
        names=(config.name,),
        hierarchy_name=hierarchy.name,
    )
