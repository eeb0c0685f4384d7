"""Training of a learned encoder: the channel, hints, runs that go on where they stopped, export."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.data import ImageSet, read_sample
from models.manifest import load_manifest, weights_folder
from models.session import load_model
from tests.shapes import SHAPES, shape_images
from tierkit.errors import InvalidInput, SetupError, WeightsError

torch = pytest.importorskip("torch", reason="needs the extra 'train' (torch)")

from encryption.training.config import CONFIGS, BottleneckConfig, find_encoder_config  # noqa: E402
from encryption.training.learner import EncoderLearner, build_parts  # noqa: E402
from encryption.training.networks import Decoder, Head, first_layers, transmit  # noqa: E402
from encryption.training.upper import load_shipped, teacher_answers  # noqa: E402
from models.training.batches import Statistics, normalise, statistics  # noqa: E402
from models.training.data import TrainingData  # noqa: E402
from models.training.networks import build_network, count_parameters  # noqa: E402
from models.training.trainer import Trainer, resume  # noqa: E402

pytestmark = pytest.mark.train

NETWORK: dict[str, Any] = {"kind": "wide-resnet", "options": {"depth": 10, "width": 1}}


def make_config(**changes) -> BottleneckConfig:
    fields: dict[str, Any] = {
        "name": "tiny",
        "tier": "edge",
        "target": "fine",
        "upper": "tiny-upper",
        "start": "random",
        "network": NETWORK,
        "hint_epochs": 1,
        "epochs": 2,
        "batch_size": 8,
        "crop_padding": 1,
        "held_out_per_class": 2,
        "precision": "fp32",
        "encoder": {"widths": [8, 16], "strides": [2, 1], "channels": 2, "levels": 4, "noise": 0.1, "cut": 2},
        "adversary": {"weight": 0.2, "width": 8},
    }
    return BottleneckConfig.model_validate({**fields, **changes})


@pytest.fixture
def data() -> ImageSet:
    return shape_images(16)


def make_trainer(data: ImageSet, folder: Path, config: BottleneckConfig | None = None) -> Trainer:
    config = config or make_config()
    torch.manual_seed(0)
    upper = build_network(config.network.kind, 3, config.network.options)
    return resume(EncoderLearner(config, TrainingData(config, data, SHAPES), upper), folder)


def statistics_of_shipped() -> Any:
    import onnx
    from onnx import numpy_helper

    graph = onnx.load(weights_folder() / "resnet-34.int8.onnx").graph
    stored = {item.name: numpy_helper.to_array(item) for item in graph.initializer}
    moved = next(node.output[0] for node in graph.node if node.op_type == "Transpose")
    scale, zero = next(node.input[1:] for node in graph.node if node.input[0] == moved)
    return Statistics(mean=int(stored[zero]), std=1 / float(stored[scale]))


def test_what_arrives_is_one_of_the_levels_and_gradients_pass_within_the_bounds():
    config = make_config().encoder.model_copy(update={"noise": 0.0, "levels": 4})
    features = torch.tensor([-0.5, 0.1, 0.2, 0.9, 1.5], requires_grad=True)
    sent = transmit(features, config)
    torch.testing.assert_close(sent, torch.tensor([0, 0, 1 / 3, 1, 1]))
    sent.sum().backward()
    assert features.grad is not None
    assert features.grad.tolist() == [0, 1, 1, 1, 0]


def test_noise_makes_the_same_features_arrive_differently():
    config = make_config().encoder.model_copy(update={"noise": 0.3, "levels": 8})
    features = torch.full((1000,), 0.5)
    sent = transmit(features, config)
    assert set((sent * 7).round().unique().tolist()) >= {2.0, 3.0, 4.0, 5.0}
    assert float(sent.mean()) == pytest.approx(0.5, abs=0.05)


def test_head_and_decoder_fit_one_another():
    config = make_config()
    upper = build_network(NETWORK["kind"], 3, NETWORK["options"])
    features = Head(upper, config.encoder)(torch.randn(4, 3, 16, 16)).detach()
    assert features.shape == (4, 2, 8, 8)
    assert 0 <= float(features.min()) <= float(features.max()) <= 1
    assert Decoder(2, 2, 8)(features).shape == (4, 3, 16, 16)
    assert Decoder(2, 4, 8)(features).shape == (4, 3, 32, 32)


def test_a_head_of_kept_blocks_starts_as_the_upper_networks_layers():
    torch.manual_seed(0)
    upper = build_network("resnet-34", 3, {"stem_kernel": 7})
    for module in upper.modules():
        if isinstance(module, torch.nn.BatchNorm2d):  # a fresh one's second has weight 0: nothing passes
            torch.nn.init.uniform_(module.weight, 0.5, 1.5)
    images = torch.randn(8, 3, 32, 32)
    encoder = {"keep": [0, 3], "channels": 4, "levels": 8, "noise": 0.0, "cut": 4}
    head = Head(upper, make_config(encoder=encoder).encoder).eval()
    with torch.inference_mode():
        expected = first_layers(upper, (0, 3)).eval()(images)
        torch.testing.assert_close(head.body(images), expected)
        assert head(images).shape == (8, 4, 8, 8)
    first = next(iter(upper.parameters()))
    before = first.detach().clone()
    with torch.no_grad():
        next(iter(head.parameters())).add_(1)
    assert torch.equal(first, before), "the head's layers are copies: the tail may still need the network's own"


def test_a_run_that_was_stopped_ends_as_an_unbroken_one(data: ImageSet, tmp_path: Path):
    for name in ("whole", "broken"):
        (tmp_path / name).mkdir()
    whole = make_trainer(data, tmp_path / "whole")
    assert whole.run()
    assert whole.steps == 3 * whole.steps_per_epoch
    first = make_trainer(data, tmp_path / "broken")
    assert not first.run(last=5)
    again = make_trainer(data, tmp_path / "broken")
    assert again.step == 5
    assert again.run()
    for name, value in whole.averaged.items():
        assert torch.equal(value, again.averaged[name]), name
    assert [row["held_out_fine"] is None for row in again.rows] == [True, False, False]
    assert again.rows == [row | {"seconds": again.rows[i]["seconds"]} for i, row in enumerate(whole.rows)]
    with pytest.raises(WeightsError, match="another configuration"):
        make_trainer(data, tmp_path / "broken", make_config(seed=1))


def test_the_hint_trains_the_head_alone(data: ImageSet, tmp_path: Path):
    trainer = make_trainer(data, tmp_path, make_config(ema_decay=0.0))
    before = {name: value.clone() for name, value in trainer.averaged.items()}
    trainer.run(last=trainer.steps_per_epoch)
    changed = {name for name, value in trainer.averaged.items() if not torch.equal(value, before[name])}
    weights = {name for name in changed if name.endswith("weight")}
    assert any(name.startswith("head.") for name in weights)
    assert {name.split(".")[1] for name in weights if name.startswith("tail.")} == {"restore"}


def test_the_adversary_makes_the_encoder_hide(data: ImageSet, tmp_path: Path):
    """With a heavy adversary a decoder trained alongside gets less out of the features."""
    alike = []
    for weight in (0.0, 20.0):
        folder = tmp_path / str(weight)
        folder.mkdir()
        adversary = {"weight": weight, "width": 8, "ramp_epochs": 0, "rate": 1e-2}
        trainer = make_trainer(data, folder, make_config(hint_epochs=0, epochs=30, adversary=adversary, peak_rate=0.05))
        trainer.run()
        alike.append(trainer.rows[-1]["adversary_ssim"])
    assert alike[1] < 0.9 * alike[0]


def test_the_shipped_resnet_answers_the_same_with_its_normalisation_restored():
    sample = read_sample().images[:300]
    known = statistics(sample)
    network = build_network("resnet-34", 100, {"stem_kernel": 7})
    load_shipped(network, "resnet-34", known, sample, None)
    entry = load_manifest().entry("resnet-34")
    expected = load_model(entry).run({"images": sample[:100]}, ["logits"])["logits"]
    # The shipped file has the statistics of the training images in its first scale.
    training = statistics_of_shipped()
    with torch.inference_mode():
        answer = network(normalise(torch.from_numpy(sample[:100]), training)).numpy()
    assert np.mean(answer.argmax(1) == expected.argmax(1)) > 0.9
    spread = [module.running_var for module in network.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    assert all(0.9 < float(value.median()) <= 1.01 for value in spread)


def test_a_shipped_network_of_another_architecture_is_refused():
    network = build_network("resnet-34", 100, {"stem_kernel": 7})
    sample = read_sample().images[:2]
    with pytest.raises(WeightsError, match="another architecture"):
        load_shipped(network, "wrn-16-4", statistics(sample), sample, None)


def test_a_teachers_answers_are_kept_for_the_next_run(tmp_path: Path):
    sample = read_sample().take(np.arange(20))
    cache = tmp_path / "answers.safetensors"
    first = teacher_answers(("wrn-16-4",), sample, cache, None)
    assert first.shape == (20, 2, 100)
    np.testing.assert_allclose(first.float().exp().sum(2).numpy(), 1, atol=0.02)
    stamp = cache.stat().st_mtime_ns
    assert torch.equal(teacher_answers(("wrn-16-4",), sample, cache, None), first)
    assert cache.stat().st_mtime_ns == stamp
    teacher_answers(("wrn-16-4",), sample.take(np.arange(10)), cache, None)
    assert cache.stat().st_mtime_ns != stamp


def test_a_head_of_another_networks_layers_starts_as_these():
    config = find_encoder_config("resnet-34-light", None)
    assert config.encoder.body is not None
    upper = build_network(config.network.kind, 100, config.network.options)
    body = build_network("mobilenet-v1", 20, config.encoder.body.network.options)
    for module in body.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            torch.nn.init.uniform_(module.weight, 0.5, 1.5)
    images = torch.randn(2, 3, 32, 32)
    head = build_parts(config, upper, body)["head"].eval()
    with torch.inference_mode():
        torch.testing.assert_close(head.body(images), first_layers(body, config.encoder.keep).eval()(images))
        assert head(images).shape == (2, config.encoder.channels, 8, 8)
    assert 2 * count_parameters(head) <= count_parameters(body)


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.toml")))
def test_bundled_configurations_describe_encoders_that_can_be_built(name: str):
    config = find_encoder_config(name, None)
    with torch.device("meta"):
        upper = build_network(config.network.kind, 100, config.network.options)
        parts = build_parts(config, upper)
        features = parts["head"](torch.zeros(2, 3, 32, 32))
        assert parts["tail"](features).shape == (2, 100)
    assert features[0].numel() <= 1024


def test_a_configuration_says_what_is_wrong_with_it(tmp_path: Path):
    with pytest.raises(InvalidInput, match="no bundled configuration 'nothing'; there is: "):
        find_encoder_config("nothing", None)
    path = tmp_path / "x.toml"
    path.write_text("name = 'x'\nchanels = 3\n")
    with pytest.raises(SetupError, match="chanels is unknown"):
        find_encoder_config("x", path)
    encoder = make_config().encoder.model_dump()
    for change, fault in (
        ({"strides": [2]}, "2 widths need as many strides, not 1"),
        ({"keep": [0]}, "either new convolutions"),
        ({"widths": [], "strides": [], "keep": [2]}, "blocks from 2 on belong to the tail"),
        ({"body": {"run": "x", "network": {"kind": "mobilenet-v1"}}}, "name the blocks"),
    ):
        with pytest.raises(ValueError, match=fault):
            make_config(encoder=encoder | change)
    config, upper = make_config(), build_network("wide-resnet", 3, NETWORK["options"])
    config = config.model_copy(update={"encoder": config.encoder.model_copy(update={"cut": 3})})
    with pytest.raises(InvalidInput, match="leaves none"):
        build_parts(config, upper)
