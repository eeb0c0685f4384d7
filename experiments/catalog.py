"""All experiments by name, in the order in which `terrace experiment all` runs them."""

from __future__ import annotations

from experiments.chaos.experiment import CHAOS
from experiments.durability import DURABILITY
from experiments.early_exit import EARLY_EXIT
from experiments.escalation import ESCALATION
from experiments.figure3 import FIGURE3
from experiments.harness import Experiment
from experiments.main_job import MAIN_JOB
from experiments.overload import OVERLOAD
from experiments.peers.duel import DUEL
from experiments.peers.engines import ENGINES
from experiments.peers.experiment import PEERS
from experiments.photographs import PHOTOGRAPHS
from experiments.scale.experiment import SCALE
from experiments.table1 import TABLE1, TABLE3
from experiments.table2 import TABLE2
from experiments.table4 import TABLE4
from experiments.table5 import FIGURE4, TABLE5
from experiments.training.experiment import TRAINING
from experiments.training.rivals import RIVALS

__all__ = ["ALL", "EXPERIMENTS"]

ALL = (
    TABLE1,
    TABLE2,
    TABLE3,
    TABLE4,
    TABLE5,
    FIGURE3,
    ESCALATION,
    SCALE,
    CHAOS,
    DURABILITY,
    MAIN_JOB,
)
"""`figure4` is drawn by `table5`; `early-exit` needs a training run, `photographs` a model set; those of training need
torch and MNIST; the four before them need a core each for server and load."""

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        *(*ALL, FIGURE4, EARLY_EXIT, PHOTOGRAPHS, PEERS, DUEL, OVERLOAD, ENGINES),
        *(TRAINING, RIVALS),
    )
}
