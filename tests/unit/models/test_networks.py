"""Architectures: parameter counts of the design, shapes, wrong options, and the CPU's form of convolutions."""

import copy
from typing import Any

import pytest

from tierkit.errors import InvalidInput

torch = pytest.importorskip("torch", reason="needs the extra 'train' (torch)")

from models.training.gemm_conv import use_matrix_products  # noqa: E402
from models.training.networks import build_network, count_parameters, reseed, running_statistics  # noqa: E402
from models.training.networks.predicted import PredictedLinear  # noqa: E402

pytestmark = pytest.mark.train


@pytest.mark.parametrize(
    ("kind", "classes", "options", "parameters"),
    [
        # DESIGN, table of models: 0.84 M, 21.3 M and 36.5 M.
        ("mobilenet-v1", 20, {"alpha": 0.5}, 828_852),
        ("resnet-34", 100, {"stem_kernel": 7}, 21_336_036),
        ("resnet-34", 100, {"stem_kernel": 3}, 21_328_356),
        ("wide-resnet", 100, {"depth": 28, "width": 10}, 36_536_884),
        ("wide-resnet", 100, {"depth": 16, "width": 2}, 703_284),
        ("early-exit", 100, {"stem_stride": 2}, 828_852 + 80 * 513 + 2_650_340),
        # Convolutions 1,685,120; dense layers 33,562,624; classifier 409,700.
        ("alexnet", 100, {}, 35_657_444),
        (
            "alexnet",
            10,
            {"image": (1, 28, 28), "widths": [4] * 5, "hidden": [8, 8]},
            104 + 404 + 3 * 148 + 520 + 72 + 90,
        ),
        ("mlp", 10, {"hidden": [100]}, 784 * 100 + 100 + 100 * 10 + 10),
        ("mlp", 10, {"inputs": 192, "hidden": [], "activation": "relu"}, 192 * 10 + 10),
    ],
)
def test_parameter_counts(kind: str, classes: int, options: dict[str, Any], parameters: int):
    assert count_parameters(build_network(kind, classes, options)) == parameters


@pytest.mark.parametrize(
    ("kind", "options", "parameters", "shape"),
    [
        ("resnet-34", {"stem_kernel": 7}, 9_472, (64, 16, 16)),
        ("wide-resnet", {"depth": 28, "width": 10}, 432, (16, 32, 32)),
    ],
)
def test_encoders(kind: str, options: dict[str, Any], parameters: int, shape: tuple[int, ...]):
    encoder = build_network(kind, 100, options).encoder
    assert count_parameters(encoder) == parameters
    assert encoder(torch.zeros(1, 3, 32, 32)).shape[1:] == shape


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("mobilenet-v1", {"alpha": 0.25, "stem_stride": 2}),
        ("mobilenet-v1", {"alpha": 0.25, "block_strides": [1, 2, 1, 1, 1, 2, 1, 1, 1, 1, 1, 2, 1]}),
        ("resnet-34", {"stem_pool": True}),
        ("wide-resnet", {"depth": 10, "width": 1}),
        ("early-exit", {"alpha": 0.25, "width": 1, "blocks": 1}),
    ],
)
def test_logits_of_any_image_size(kind: str, options: dict[str, Any]):
    network = build_network(kind, 7, options).eval()
    for side in (32, 48):
        assert network(torch.zeros(2, 3, side, side)).shape == (2, 7)


def test_the_chain_of_alexnet_is_the_network():
    network = build_network("alexnet", 7, {"widths": [4] * 5, "hidden": [8, 8]}).eval()
    given = images = torch.randn(2, 3, 32, 32)
    for block in network.chain():
        given = block(given)
    assert torch.equal(given, network(images))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("vgg", {}),
        ("resnet-34", {"stem_kernel": 5}),
        ("resnet-34", {"depth": 34}),
        ("wide-resnet", {"depth": 27}),
        ("wide-resnet", {"depth": 10, "width": -1}),
        ("mobilenet-v1", {"block_strides": [1, 2]}),
        ("alexnet", {"hidden": [64]}),
        ("alexnet", {"widths": [64] * 4}),
        ("alexnet", {"image": [3, 32]}),
        ("alexnet", {"image": [3, 32, 0]}),
        ("alexnet", {"dropout": -0.1}),
        ("mlp", {"hidden": 100}),
        ("mlp", {"hidden": [64, 0]}),
        ("mlp", {"hidden": ["64"]}),
        ("mlp", {"inputs": 784.0}),
        ("mlp", {"activation": "gelu"}),
        ("mlp", {"dropout": 1.0}),
        ("mlp", {"dropout": "0.5"}),
    ],
)
def test_wrong_options_are_refused(kind: str, options: dict[str, Any]):
    with pytest.raises(InvalidInput):
        build_network(kind, 10, options)


def test_dropout_leaves_units_out_in_training_alone():
    network = build_network("mlp", 10, {"inputs": 48, "hidden": [1000], "dropout": 0.25})
    images = torch.randn(2, 3, 4, 4)
    assert float((network.embed(images) == 0).float().mean()) == pytest.approx(0.25, abs=0.05)
    network.eval()
    assert torch.equal(network(images), network(images))
    assert int((network.embed(images) == 0).sum()) == 0


def test_dropout_follows_from_its_seed_whoever_else_draws_numbers():
    network = build_network("mlp", 10, {"inputs": 48, "hidden": [100, 100], "dropout": 0.5})
    images, outputs = torch.randn(2, 3, 4, 4), []
    for seed in (7, 7, 8):
        reseed(network, seed)
        torch.rand(1)
        outputs.append(network(images))
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize(
    ("kind", "options"),
    [("mobilenet-v1", {"alpha": 0.25}), ("resnet-34", {}), ("wide-resnet", {"depth": 10, "width": 1})],
)
def test_matrix_products_give_the_same_answers_and_gradients(kind: str, options: dict[str, Any]):
    torch.manual_seed(0)
    plain = build_network(kind, 10, options).double()
    fast = copy.deepcopy(plain)
    use_matrix_products(fast)
    images = torch.randn(4, 3, 32, 32, dtype=torch.float64)
    outputs = [network(images) for network in (plain, fast)]
    torch.testing.assert_close(outputs[1], outputs[0])
    for output in outputs:
        output.square().sum().backward()
    for one, other in zip(plain.parameters(), fast.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad)


def test_predicted_weights_of_near_pixels_are_alike() -> None:
    layer = PredictedLinear(784, 10, 0.25)
    assert layer.weight.shape == (10, 196)
    assert {name for name, _ in layer.named_parameters()} == {"weight", "bias"}
    assert set(layer.state_dict()) == {"weight", "bias"}
    with torch.inference_mode():
        whole = (layer(torch.eye(784)) - layer.bias).T.reshape(10, 28, 28)
    near = (whole[:, :, 1:] - whole[:, :, :-1]).pow(2).mean()
    far = (whole[:, :, 14:] - whole[:, :, :-14]).pow(2).mean()
    assert near < far / 2


def test_predicted_weights_follow_the_learned_ones() -> None:
    layer = PredictedLinear(784, 1, 0.5)
    rows, columns = torch.meshgrid(torch.arange(28.0), torch.arange(28.0), indexing="ij")
    smooth = torch.sin(rows / 5) + torch.cos(columns / 7)
    chosen = layer.spread.argmax(dim=1)  # each learned weight counts most for its own pixel
    with torch.no_grad():
        layer.weight.copy_(smooth.reshape(1, -1)[:, chosen])
        layer.bias.zero_()
        found = layer(torch.eye(784)).reshape(28, 28)
    assert (found - smooth).abs().mean() < 0.1


@pytest.mark.parametrize(("inputs", "share"), [(783, 0.5), (784, 0.0), (784, 1.0), (784, -1.0), (784, float("nan"))])
def test_predicted_weights_that_cannot_be_are_refused(inputs: int, share: float) -> None:
    with pytest.raises(InvalidInput, match="predicted"):
        build_network("mlp", 10, {"inputs": inputs, "predicted": share})


def test_predicted_weights_without_a_hidden_layer_are_refused() -> None:
    with pytest.raises(InvalidInput, match="predicted needs a hidden layer"):
        build_network("mlp", 10, {"hidden": [], "predicted": 0.25})


def test_a_layer_with_all_its_weights_answers_the_same() -> None:
    layer, values = PredictedLinear(784, 5, 0.25), torch.randn(3, 784)
    with torch.inference_mode():
        torch.testing.assert_close(layer.as_linear()(values), layer(values), rtol=1e-4, atol=1e-4)


def test_a_predicted_layer_makes_and_exchanges_only_the_values_that_it_learns() -> None:
    made = []

    def count(_module: Any, _name: str, parameter: Any | None) -> None:
        made.append(0 if parameter is None else parameter.numel())

    counting = torch.nn.modules.module.register_module_parameter_registration_hook(count)
    try:
        network = build_network("mlp", 10, {"predicted": 0.25})
    finally:
        counting.remove()
    assert sum(made) == count_parameters(network) == 196 * 100 + 100 + 100 * 10 + 10
    assert running_statistics(network) == []
    assert len(running_statistics(build_network("resnet-34", 10, {}))) > 0


def test_only_the_first_layer_predicts() -> None:
    network = build_network("mlp", 10, {"hidden": [20, 30], "predicted": 0.25})
    assert count_parameters(network) == 196 * 20 + 20 + 20 * 30 + 30 + 30 * 10 + 10
    assert network(torch.zeros(2, 1, 28, 28)).shape == (2, 10)
