"""Terrace's own strategies. `period` and rates are our choice if the sources leave them open, or name several."""

from __future__ import annotations

from training.strategies.config import (
    BLOCK,
    BatchConfig,
    ExchangeConfig,
    OuterConfig,
    ServerConfig,
    TournamentConfig,
)

# McMahan et al. 2017, arXiv:1602.05629.
FEDAVG = OuterConfig()
SGD = ServerConfig(rule="sgd")
# Dean et al. 2012, section 4.1: AdaGrad at the server, and a fetch and a push at each step in its experiments.
DOWNPOUR = ServerConfig(rule="adagrad", rate=0.1)
DC_CONSTANT = ServerConfig(rule="dc-constant", delay_compensation=0.04)
DC_ADAPTIVE = ServerConfig(rule="dc-adaptive", delay_compensation=2.0)
AVERAGE = ServerConfig(rule="average", period=10)
# The volunteers' platform of 2018, section 4.3: the host averages after every batch.
CROWDSOURCED = ServerConfig(rule="average")
# Chen and Huo 2016: block momentum 1 - 1/N with rate 1.
BMUF = OuterConfig(momentum=BLOCK, nesterov=True)
# Douillard et al. 2023, arXiv:2311.08105: AdamW in the workers; Nesterov, rate 0.7, momentum 0.9 outside.
DILOCO = OuterConfig(rate=0.7, momentum=0.9, nesterov=True, inner="adamw", inner_rate=0.002)
# Jacobs et al. 2017, LTFB; variations as in Jaderberg et al. 2017, arXiv:1711.09846.
TOURNAMENT = TournamentConfig()
# Dean et al. 2012, section 4.2: Sandblaster.
LBFGS = BatchConfig()

# ChainerMN: forward, backward, all-reduce, step.
ALLREDUCE = ExchangeConfig(rule="allreduce")
ELASTIC = ExchangeConfig(rule="allreduce", elastic=True)
# Daily et al. 2018, arXiv:1803.05880.
GOSSIP = ExchangeConfig(rule="gossip")
# Ding et al. 2017.
ENSEMBLE = ExchangeConfig(rule="ensemble")
# Huang et al. 2019, arXiv:1811.06965; Narayanan et al. 2019.
PIPELINE = ExchangeConfig(rule="pipeline")
# Krizhevsky 2014, arXiv:1404.5997.
HYBRID = ExchangeConfig(rule="hybrid")
# Chilimbi et al. 2014 (Project Adam).
FACTORS = ExchangeConfig(rule="factors")
