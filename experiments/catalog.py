"""All experiments by name, in the order in which `terrace experiment all` runs them."""

from __future__ import annotations

from experiments.chaos.experiment import CHAOS
from experiments.early_exit import EARLY_EXIT
from experiments.escalation import ESCALATION
from experiments.figure3 import FIGURE3
from experiments.harness import Experiment
from experiments.improve.experiment import IMPROVE_LOOP
from experiments.scale.experiment import SCALE
from experiments.table1 import TABLE1, TABLE3
from experiments.table2 import TABLE2
from experiments.table4 import TABLE4
from experiments.table5 import FIGURE4, TABLE5
from experiments.training.experiment import TRAINING

__all__ = ["ALL", "EXPERIMENTS"]

ALL = (TABLE1, TABLE2, TABLE3, TABLE4, TABLE5, FIGURE3, ESCALATION, SCALE, CHAOS)
"""`table5` draws `figure4`; `early-exit` needs a training run; `training` and `improve` need torch and data sets."""

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment for experiment in (*ALL, FIGURE4, EARLY_EXIT, TRAINING, IMPROVE_LOOP)
}
