"""The contract tests of extensions pass for sound ones, and name the fault of others."""

import asyncio
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel, SecretStr

from encryption.noise import NOISE
from terrace.testing import check_encoder, check_engine, check_network, check_sink, check_source, check_strategy
from tests.extension_package.terrace_example.encoders import REVERSED
from tests.extension_package.terrace_example.engines import ENGINE
from tests.extension_package.terrace_example.sinks import LINES
from tests.extension_package.terrace_example.sources import ColourSource
from tests.extension_package.terrace_example.strategies import FEDADAM, SOFTSYNC, FedAdam
from tierkit.errors import BrokenExtension, InvalidInput
from tierkit.extensions import BUILT_IN, load
from training.strategies.config import OuterConfig
from training.strategies.rules import Moment, StrategyKind, UpdateRule
from training.units import Flat


def wrong(fault: str) -> Any:
    return pytest.raises(AssertionError, match=fault)


def test_sound_engines_pass() -> None:
    check_engine(ENGINE)
    check_engine(load("terrace.engines", "onnx"))  # type: ignore[arg-type]  # objects of a registry


def test_an_engine_that_reads_no_setting_of_a_node_is_named() -> None:
    class Engine(type(ENGINE)):  # type: ignore[misc]  # the class of the example has a private name
        reads = ("horsepower",)

    with wrong("reads names no settings of a cloud node: horsepower"):
        check_engine(Engine())


@pytest.mark.parametrize("name", BUILT_IN["terrace.strategies"])
def test_built_in_strategies_pass(name: str) -> None:
    check_strategy(load("terrace.strategies", name))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [FEDADAM, SOFTSYNC], ids=["fedadam", "softsync"])
def test_strategies_with_a_rule_pass(kind: StrategyKind) -> None:
    check_strategy(kind)


class _Ascends(UpdateRule):
    def apply(self, weights: Flat, update: Flat, kept: Sequence[Flat], moment: Moment) -> None:
        weights += update


class _Greedy(UpdateRule):
    def apply(self, weights: Flat, update: Flat, kept: Sequence[Flat], moment: Moment) -> None:
        update *= np.float32(0.5)
        weights -= update


class _Forgetful(UpdateRule):
    def __init__(self) -> None:
        self._velocity: Any = 0

    def apply(self, weights: Flat, update: Flat, kept: Sequence[Flat], moment: Moment) -> None:
        self._velocity = 0.5 * self._velocity + update
        weights -= np.float32(0.1) * self._velocity


class _Scaled(UpdateRule):
    by_value = True

    def apply(self, weights: Flat, update: Flat, kept: Sequence[Flat], moment: Moment) -> None:
        weights -= np.float32(0.1) * update / max(np.float32(1), np.linalg.norm(update))


class _Breaks(UpdateRule):
    def apply(self, weights: Flat, update: Flat, kept: Sequence[Flat], moment: Moment) -> None:
        raise RuntimeError("no GPU")


class _Wild(UpdateRule):
    def apply(self, weights: Flat, update: Flat, kept: Sequence[Flat], moment: Moment) -> None:
        weights -= update / np.float32(0)


@pytest.mark.parametrize(
    ("rule", "fault"),
    [
        (_Ascends, "lead away from the minimum"),
        (_Greedy, "apply changes the update"),
        (_Forgetful, "keep everything in `kept`"),
        (_Scaled, "the pieces give other weights"),
        (_Wild, "no finite numbers after update 0"),
    ],
)
@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
def test_the_fault_of_a_rule_is_named(rule: type[UpdateRule], fault: str) -> None:
    with wrong(fault):
        check_strategy(StrategyKind(config=OuterConfig(), rule=rule))


def test_a_rule_that_breaks_is_named() -> None:
    with pytest.raises(BrokenExtension, match="the rule _Breaks fails: RuntimeError: no GPU"):
        check_strategy(StrategyKind(config=OuterConfig(), rule=_Breaks))


def test_rounds_have_no_weights_to_start_from() -> None:
    with wrong("rounds keep no older weights"):
        check_strategy(StrategyKind(config=OuterConfig(), rule=SOFTSYNC.rule))


def test_a_rule_refuses_options_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="below 1"):
        FedAdam(first=1.0)


def test_sound_encoders_pass() -> None:
    check_encoder(REVERSED)


def test_the_built_in_noise_needs_a_key() -> None:
    with pytest.raises(AssertionError):
        check_encoder(NOISE)


def test_the_fault_of_an_encoder_is_named() -> None:
    class Fresh(type(REVERSED)):  # type: ignore[misc]
        def hide(self, encoder: Any, images: Any, features: Any, keys: Any) -> Any:
            noise = np.random.default_rng().standard_normal(features.shape, np.float32)
            return features + noise

    class InPlace(type(REVERSED)):  # type: ignore[misc]
        def hide(self, encoder: Any, images: Any, features: Any, keys: Any) -> Any:
            features *= -1
            return features

    with wrong("hidden otherwise the second time"):
        check_encoder(Fresh())
    with wrong("hide changes the features"):
        check_encoder(InPlace())


def test_sound_sources_pass() -> None:
    check_source(ColourSource, "colours://ff8000", rate=1000.0)
    with pytest.raises(InvalidInput, match="six hexadecimal digits"):
        check_source(ColourSource, "colours://red")


def test_the_fault_of_a_source_is_named() -> None:
    class Ends(ColourSource):
        async def run(self, intake: Any, alive: Any) -> None:
            return

    class Breaks(ColourSource):
        async def run(self, intake: Any, alive: Any) -> None:
            raise RuntimeError("the lens is dirty")

    with wrong("gave 0 pictures of 3"):
        check_source(Ends, "colours://ff8000")
    with pytest.raises(RuntimeError, match="the lens is dirty"):
        check_source(Breaks, "colours://ff8000")


def test_sound_sinks_pass(tmp_path: Path) -> None:
    event = SimpleNamespace(id="evt_7", type="job.completed")
    check_sink(LINES, {"path": str(tmp_path / "lines")}, events=[event, event])
    assert (tmp_path / "lines").read_text().count('{"id": "evt_7", "type": "job.completed"}\n') == 2


def test_a_sink_that_takes_any_option_is_named(tmp_path: Path) -> None:
    class Options(BaseModel):
        path: Path

    class Lines(type(LINES)):  # type: ignore[misc]
        pass

    Lines.Options = Options
    with wrong("unknown option"):
        check_sink(Lines(), {"path": str(tmp_path / "lines")})


def test_a_sink_gets_a_test_event(tmp_path: Path) -> None:
    check_sink(LINES, {"path": str(tmp_path / "lines")})
    assert "sink.test" in (tmp_path / "lines").read_text()


class _Options(BaseModel, extra="forbid"):
    pass


class _Secret(BaseModel, extra="forbid"):
    token: SecretStr = SecretStr("")


class _Sink:
    """A sink whose `deliver` is the function that a test gives."""

    Options: type[BaseModel] = _Options

    def __init__(self, deliver: Any = None) -> None:
        self._deliver = deliver

    def open(self, options: Any, context: Any) -> Any:
        return nullcontext(SimpleNamespace(**({"deliver": self._deliver} if self._deliver else {})))


async def _raises(event: Any) -> None:
    raise SystemExit(3)


async def _answers(event: Any) -> int:
    return 200


async def _hangs(event: Any) -> None:
    await asyncio.Event().wait()


async def _blocks(event: Any) -> None:
    threading.Event().wait(60)


@pytest.mark.parametrize(
    ("deliver", "fault"),
    [
        (None, "which has no deliver"),
        (lambda event: None, "deliver must be an async function"),
        (_raises, "raises SystemExit: 3"),
        (_answers, "deliver returns None"),
        (_hangs, "longer than 0.5 s"),
        (_blocks, "blocks the event loop: use asyncio.to_thread"),
    ],
    ids=["missing", "sync", "raises", "answers", "hangs", "blocks"],
)
def test_the_fault_of_a_sink_is_named(deliver: Any, fault: str) -> None:
    with wrong(fault):
        check_sink(_Sink(deliver), {}, within_s=0.5)


def test_options_that_cannot_be_stored_are_named() -> None:
    sink = _Sink(_hangs)
    sink.Options = _Secret
    with wrong("the option token is a secret"):
        check_sink(sink, {"token": "s3cret"})


def test_an_object_that_is_no_extension_is_named() -> None:
    one: Any = 1
    with wrong("it has no reads, check"):
        check_engine(one)
    with wrong("name an instance of it"):
        check_engine(type(ENGINE))  # type: ignore[arg-type]
    with wrong("it has no hide, restore"):
        check_encoder(one)
    with wrong("must be a class or a function"):
        check_source(one, "colours://ff8000")
    with wrong("it has no Options.model_validate, open"):
        check_sink(one, {})
    with wrong("int is not a configuration"):
        check_strategy(one)


@pytest.mark.train
def test_networks() -> None:
    pytest.importorskip("torch")
    from torch import nn

    from tests.extension_package.terrace_example.networks import Linear

    check_network(Linear)
    check_network(load("terrace.networks", "mobilenet-v1"), {"alpha": 0.5})  # type: ignore[arg-type]

    class Flat(nn.Module):  # type: ignore[misc]
        def __init__(self, classes: int) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(3072, classes), nn.Linear(2, 2)

        def forward(self, images: Any) -> Any:
            return self.used(images.flatten(1))

    with wrong("parameters without a gradient: unused.weight, unused.bias"):
        check_network(Flat)
