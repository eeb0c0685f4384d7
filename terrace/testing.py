"""Contract tests for authors of extensions: each takes the object of an entry point and tries it.

They raise AssertionError with what is wrong. `docs/how-to/extending.md` shows them in a test of pytest.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import io
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image
from pydantic import BaseModel, ValidationError

from tierkit.errors import BrokenExtension, InvalidInput
from tierkit.extensions import fault_of

if TYPE_CHECKING:
    from cloud_node.engines import EngineKind
    from cloud_node.settings import CloudSettings
    from encryption.hiding import Hiding
    from end_node.settings import SourceSettings
    from end_node.sources.picture import SourceKind, TakenPicture
    from models.training.networks import NetworkKind
    from training.strategies.config import StrategyConfig
    from training.strategies.rules import StrategyKind, UpdateRule
    from training.units import Flat

__all__ = ["check_encoder", "check_engine", "check_network", "check_sink", "check_source", "check_strategy"]

_VALUES = 200_000
_UPDATES = 60
_STOP_S = 5.0
_BLOCKED_S = 2.0
"""Longest time without a turn of the event loop."""


def _check_parts(group: str, kind: object) -> None:
    assert not (fault := fault_of(group, kind)), fault


def check_engine(kind: EngineKind, settings: CloudSettings | None = None) -> None:
    """Load the bundled networks with an engine, and compare the answers to one image and to a batch.

    Args:
        settings: for the engine. Default: the defaults of `CloudSettings`.
    """
    _check_parts("terrace.engines", kind)
    asyncio.run(_check_engine(kind, settings))


async def _check_engine(kind: EngineKind, settings: CloudSettings | None) -> None:
    from cloud_node.settings import CloudSettings
    from models.manifest import load_manifest
    from tierkit.http.lifecycle import Lifecycle

    settings, lifecycle, manifest = settings or CloudSettings(), Lifecycle(), load_manifest()
    unknown = set(kind.reads) - set(CloudSettings.model_fields)
    assert not unknown, f"reads names no settings of a cloud node: {', '.join(sorted(unknown))}"
    kind.check(settings)
    assert kind.batch_images(settings) >= 1, "batch_images is at least 1"
    served = await kind.load(settings, manifest, lifecycle)
    assert served.ready, "an engine serves at least one network"
    async with contextlib.AsyncExitStack() as stack:
        if served.engine is not None:
            await stack.enter_async_context(served.engine.running(lifecycle))
        for model in served.ready:
            (takes,) = model.inputs
            shape = (5, *takes.shape[1:])
            images = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
            wanted = ["logits", "probabilities"]
            whole = await asyncio.to_thread(model.run, {takes.name: images}, wanted)
            first = await asyncio.to_thread(model.run, {takes.name: images[:1]}, wanted)
            classes = len(model.labels["logits"])
            for name in wanted:
                assert whole[name].shape == (5, classes), f"{name} is [n, {classes}], not {list(whole[name].shape)}"
                assert np.isfinite(whole[name]).all(), f"{name} holds NaN or infinity"
            assert np.allclose(whole["logits"][:1], first["logits"], atol=0.01), "an answer depends on the batch"
            sums = whole["probabilities"].sum(axis=1)
            assert np.allclose(sums, 1, atol=0.001), "the probabilities of an image add up to 1"


def check_strategy(kind: StrategyKind | StrategyConfig) -> None:
    """Let a strategy find the minimum of a square, interrupt it, and compare the whole with the parts."""
    from pydantic import TypeAdapter

    from training.strategies.config import ExchangeConfig, OuterConfig, StrategyConfig
    from training.strategies.rules import Moment, StrategyKind, applied

    config = kind.config if isinstance(kind, StrategyKind) else kind
    assert isinstance(config, StrategyConfig), f"{type(config).__name__} is not a configuration of a strategy"
    if not isinstance(config, ExchangeConfig):  # ranks read the configuration themselves
        copy = TypeAdapter(type(config)).validate_json(config.model_dump_json())
        assert copy == config, "the configuration is another one after it has been sent"
    if not isinstance(kind, StrategyKind):
        return
    config = kind.config
    assert not (isinstance(config, OuterConfig) and kind.rule().needs_start), "rounds keep no older weights"
    goal = np.random.default_rng(0).standard_normal(_VALUES, np.float32)

    def continued(rule: UpdateRule, weights: Flat, kept: Sequence[Flat], versions: range) -> None:
        for version in versions:
            update = np.float32(1.0 if config.sends == "gradient" else 0.1) * (weights - goal)
            before = update.copy()
            start = weights.copy() if rule.needs_start else None
            applied(rule, weights, update, kept, Moment(version=version, rate=0.05, start=start))
            assert np.array_equal(update, before), "apply changes the update"
            assert weights.dtype == np.float32, "the weights stay FP32"
            assert np.isfinite(weights).all(), f"the weights are no finite numbers after update {version}"

    rule = kind.rule(**config.options)
    weights, kept = np.zeros_like(goal), [np.zeros_like(goal) for _ in range(rule.keeps)]
    continued(rule, weights, kept, range(_UPDATES // 2))
    other = [each.copy() for each in (weights, *kept)]
    continued(rule, weights, kept, range(_UPDATES // 2, _UPDATES))
    distance = np.linalg.norm(weights - goal) / np.linalg.norm(goal)
    assert distance < 1, f"{_UPDATES} updates lead away from the minimum: its distance is {distance:.2f} of that before"
    continued(kind.rule(**config.options), other[0], other[1:], range(_UPDATES // 2, _UPDATES))
    assert np.array_equal(weights, other[0]), "after an interruption it continues otherwise: keep everything in `kept`"
    if rule.by_value:
        pieces, whole = (np.zeros_like(goal) for _ in range(2))
        for target, by_value in ((pieces, True), (whole, False)):
            fresh: Any = kind.rule(**config.options)
            fresh.by_value = by_value
            continued(fresh, target, [np.zeros_like(goal) for _ in range(fresh.keeps)], range(3))
        assert np.array_equal(pieces, whole), "by_value is True, and the pieces give other weights than the whole"


def check_encoder(hiding: Hiding) -> None:
    """Hide features of the bundled encoders, with and without a key, and restore them."""
    from encryption.features import pack, unpack
    from encryption.noise import KEY_BYTES
    from models.manifest import load_manifest
    from tierkit.types import FeatureForm

    _check_parts("terrace.encoders", hiding)
    chance = np.random.default_rng(0)
    for bundled in load_manifest().encoders:
        network = load_manifest().entry(bundled.network)
        images = chance.integers(0, 256, (3, *network.input_shape), np.uint8)
        shape = (3, *bundled.feature_shape)
        levels = chance.integers(0, bundled.levels, shape, np.uint8)
        features = unpack(bundled, levels)
        for noise in (0.0, 0.1):
            encoder = bundled.model_copy(update={"noise": noise, "hiding": "checked"})
            keys = chance.integers(0, 256, (3, KEY_BYTES), np.uint8) if noise else None
            given = features.copy()
            hidden = hiding.hide(encoder, images, given, keys)
            assert np.array_equal(given, features), "hide changes the features that it gets"
            assert hidden.shape == shape, f"hidden features are {list(shape)}, not {list(hidden.shape)}"
            assert hidden.dtype == np.float32, f"hidden features are FP32, not {hidden.dtype}"
            again = hiding.hide(encoder, images, features, keys)
            assert np.array_equal(hidden, again), "the same image and key are hidden otherwise the second time"
            single = hiding.hide(encoder, images[1:2], features[1:2], None if keys is None else keys[1:2])
            assert np.array_equal(hidden[1:2], single), "an image is hidden otherwise if others are in its batch"
            sent = unpack(encoder, pack(encoder, hidden, FeatureForm.UINT8))
            restored = hiding.restore(encoder, sent)
            assert restored.shape == shape, f"restored features are {list(shape)}, not {list(restored.shape)}"
            assert np.isfinite(restored).all(), "restored features hold NaN or infinity"


def check_source(
    kind: SourceKind, url: str, *, rate: float | None = None, pictures: int = 3, within_s: float = 30.0
) -> None:
    """Take some pictures from a source that is there, and stop it."""
    from end_node.settings import SourceSettings

    _check_parts("terrace.sources", kind)
    # Without its validation, which knows only kinds that are installed.
    settings = SourceSettings.model_construct(name="checked", url=url, rate=rate)
    asyncio.run(_check_source(kind, settings, pictures, within_s))


class _Taker:
    def __init__(self, pictures: int) -> None:
        self.taken: list[TakenPicture] = []
        self.done = asyncio.Event()
        self._pictures = pictures

    async def take(self, picture: TakenPicture) -> None:
        self.taken.append(picture)
        if len(self.taken) >= self._pictures:
            self.done.set()

    async def known(self, marks: Collection[str]) -> Collection[str]:
        return ()


async def _check_source(kind: SourceKind, settings: SourceSettings, pictures: int, within_s: float) -> None:
    taker, skipped = _Taker(pictures), list[int]()
    running = asyncio.create_task(kind(settings, None).run(taker, skipped.append))
    waiting = asyncio.create_task(taker.done.wait())
    await asyncio.wait([running, waiting], timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if running.done() and (error := running.exception()) is not None:
        raise error
    got = len(taker.taken)
    assert got >= pictures, f"the source gave {got} pictures of {pictures} within {within_s:g} s"
    for each in taker.taken:
        with Image.open(io.BytesIO(each.content)) as image:
            assert image.format in ("JPEG", "PNG", "WEBP"), f"a picture is {image.format}, not JPEG, PNG or WebP"
            image.load()
    running.cancel()
    await asyncio.wait([running], timeout=_STOP_S)
    assert running.done(), f"the source does not stop within {_STOP_S:g} s"


def check_sink(
    kind: Any,
    options: Mapping[str, Any],
    *,
    context: Any = None,
    events: Sequence[Any] | None = None,
    within_s: float = 10.0,
) -> None:
    """Check the options of a sink, open it, and deliver events. The receiver has to be there, and take them.

    Args:
        options: the table `[options]`.
        context: the `SinkContext`. Default: one that allows private addresses.
        events: to deliver. Default: a test event.
        within_s: limit on all of it.
    """
    from scheduler.sinks.protocol import SinkContext, SinkEvent, options_of, stored_options

    _check_parts("terrace.sinks", kind)
    made = kind.Options
    assert isinstance(made, type), "Options is a class"
    assert issubclass(made, BaseModel), "Options derives from pydantic.BaseModel"
    with contextlib.suppress(ValidationError):
        made.model_validate({**options, "no_such_option": 1})
        raise AssertionError('Options takes an unknown option: set model_config = ConfigDict(extra="forbid")')
    try:
        checked = options_of(kind, stored_options(kind, options))
    except (BrokenExtension, InvalidInput) as exc:
        raise AssertionError(str(exc)) from exc
    said = {"sink": "checked", "text": "a test event"}
    test = SinkEvent(type="sink.test", key="sink/checked", at=time.time(), data=said)

    async def deliver() -> None:
        its = context or SinkContext(name="checked", allow_private=True)
        async with kind.open(checked, its) as receiver:
            assert hasattr(receiver, "deliver"), f"open yields {type(receiver).__name__}, which has no deliver"
            for event in (test,) if events is None else events:
                delivering = receiver.deliver(event)
                assert inspect.isawaitable(delivering), "deliver must be an async function"
                assert await delivering is None, "deliver returns None, or raises"

    _run_watched(deliver, within_s)


def _run_watched(work: Callable[[], Coroutine[Any, Any, None]], within_s: float) -> None:
    """Run a coroutine of a sink in a thread, whose event loop must never be blocked.

    Raises:
        AssertionError: it fails, blocks, or takes longer than `within_s`.
    """
    turns, ended = [time.monotonic()], threading.Event()
    faults: list[BaseException] = []

    async def turn() -> None:
        while True:
            turns[0] = time.monotonic()
            await asyncio.sleep(_BLOCKED_S / 10)

    async def watched() -> None:
        turning = asyncio.create_task(turn())
        try:
            async with asyncio.timeout(within_s) as limit:
                await work()
        except TimeoutError as exc:
            assert not limit.expired(), f"open and deliver take longer than {within_s:g} s"
            raise exc
        finally:
            turning.cancel()

    def run() -> None:
        try:
            asyncio.run(watched())
        except BaseException as exc:  # code of others may raise anything
            faults.append(exc)
        ended.set()

    threading.Thread(target=run, daemon=True).start()
    while not ended.wait(_BLOCKED_S / 10):
        quiet_s = time.monotonic() - turns[0]
        assert quiet_s < _BLOCKED_S, (
            "open or deliver blocks the event loop: use asyncio.to_thread for what may take long"
        )
    if faults:
        (fault,) = faults
        if isinstance(fault, AssertionError):
            raise fault
        raise AssertionError(f"open or deliver raises {type(fault).__name__}: {fault}") from fault


def check_network(
    kind: NetworkKind, options: Mapping[str, Any] | None = None, *, shape: tuple[int, int, int] = (3, 32, 32)
) -> None:
    """Train a network for some steps on a few images, whose loss has to fall. It needs the extra `learn`.

    Args:
        shape: channels, height and width of an image.
    """
    import torch

    _check_parts("terrace.networks", kind)
    torch.manual_seed(0)
    network = kind(4, **(options or {}))
    images, labels = torch.randn(8, *shape), torch.arange(8) % 4
    rule = torch.optim.SGD(network.parameters(), lr=0.01)
    losses = []
    for _ in range(20):
        logits = network(images)
        assert tuple(logits.shape) == (8, 4), f"the logits are [8, 4], not {list(logits.shape)}"
        loss = torch.nn.functional.cross_entropy(logits, labels)
        rule.zero_grad()
        loss.backward()
        without = [name for name, each in network.named_parameters() if each.requires_grad and each.grad is None]
        assert not without, f"parameters without a gradient: {', '.join(without)}"
        rule.step()
        losses.append(float(loss.detach()))
    assert np.isfinite(losses).all(), "the loss is NaN or infinite"
    assert losses[-1] < losses[0], f"the loss of eight images does not fall in 20 steps: {losses[0]} to {losses[-1]}"
    network.eval()
    with torch.inference_mode():
        assert torch.equal(network(images), network(images)), "in eval mode, the same images have other answers"
