"""The heads of a node beside its own network."""

import asyncio
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from encryption.heads import Encoders
from encryption.serving import HeadModel, offer_of
from end_node.settings import EndSettings
from models.manifest import load_manifest
from models.split import FEATURES
from tierkit.inference.files import FileDecoder
from tierkit.inference.runner import ModelRunner
from tierkit.inference.thread import InferenceThread
from tierkit.tensors import Array, TensorSpec
from tierkit.testing import wait_for
from tierkit.types import FeatureForm
from tierkit.wire.messages import Encoding

IMAGES = np.zeros((2, 32, 32, 3), np.uint8)


class Coarse:
    """Waits behind a gate, and writes down its turn."""

    name, version, platform, sha256 = "coarse", "1", "numpy", "0" * 64
    inputs = (TensorSpec(name="images", datatype="UINT8", shape=(-1, 32, 32, 3)),)
    outputs = (TensorSpec(name="logits", datatype="FP32", shape=(-1, 1)),)
    labels: Mapping[str, Sequence[str]] = {}
    parameters: Mapping[str, str | int | float | bool] = {}

    def __init__(self, turns: list[str]) -> None:
        self.turns = turns
        self.entered, self.gate = threading.Event(), threading.Event()

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        self.entered.set()
        assert self.gate.wait(20)
        self.turns.append("coarse")
        return {name: np.zeros((len(inputs["images"]), 1), np.float32) for name in outputs}


class Network:
    """In the place of the head's network."""

    input_shape = (32, 32, 3)

    def __init__(self, turns: list[str], feature_shape: tuple[int, ...]) -> None:
        self.turns = turns
        self.feature_shape = feature_shape

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        self.turns.append("head")
        return {FEATURES: np.zeros((len(inputs["images"]), *self.feature_shape), np.float32)}


async def test_a_head_does_not_wait_for_the_coarse_answers_of_the_tasks_behind_it() -> None:
    encoder = next(encoder for encoder in load_manifest().encoders if encoder.name == "resnet-34.conv1")
    turns: list[str] = []
    network: Any = Network(turns, encoder.feature_shape)
    head = HeadModel(encoder, network, lambda: network)
    head.load()
    encoding = Encoding(
        name=encoder.name, head=encoder.head.sha256, tail=encoder.tail.sha256, form=FeatureForm.UINT8, noise_key=""
    )
    thread, coarse = InferenceThread(), Coarse(turns)
    encoders = Encoders([head], EndSettings())
    async with ModelRunner(coarse, max_batch_size=2, thread=thread) as runner, encoders.running(thread, FileDecoder()):
        asked = [asyncio.create_task(runner.infer({"images": IMAGES}, ["logits"])) for _ in range(4)]
        await wait_for(coarse.entered.is_set, what="the first task")
        encoded = asyncio.create_task(encoders.encode(IMAGES, encoding, budget_s=20.0))
        await wait_for(lambda: encoders._held[offer_of(encoder)].runner.queued_images == 2)
        coarse.gate.set()
        await asyncio.gather(*asked, encoded)
    assert turns == ["coarse", "head", "coarse", "coarse", "coarse"]
