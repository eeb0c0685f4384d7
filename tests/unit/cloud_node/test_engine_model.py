"""Batches in pieces, for what computes several of them side by side; logits, whatever a server gives."""

import subprocess
import sys
from importlib.util import find_spec
from itertools import pairwise

import numpy as np
import pytest

from cloud_node.engines import load_engine, load_next
from cloud_node.engines.model import cut
from cloud_node.engines.oip import logits_in
from cloud_node.settings import CloudSettings
from models.manifest import load_manifest
from models.serving import key_of
from models.session import softmax
from tierkit.errors import InvalidAnswer, MissingExtra, NeedsRestart, SetupError
from tierkit.http.lifecycle import Lifecycle
from tierkit.inference.served import Loaded
from tierkit.settings import load_settings


@pytest.mark.parametrize(
    ("images", "most", "ways", "sizes"),
    [
        (1, 64, 1, [1]),
        (50, 64, 1, [50]),
        (128, 64, 1, [64, 64]),
        (65, 64, 1, [32, 33]),
        (50, 64, 2, [25, 25]),
        (7, 64, 2, [7]),  # not worth a second request
        (8, 64, 2, [4, 4]),
        (50, 64, 8, [6, 6, 6, 7, 6, 6, 6, 7]),
        (512, 64, 2, [64] * 8),  # more than it computes side by side now: what it scales by
        (3, 1, 1, [1, 1, 1]),
    ],
)
def test_pieces_of_a_batch(images: int, most: int, ways: int, sizes: list[int]) -> None:
    ends = cut(images, most=most, ways=ways)
    assert [b - a for a, b in pairwise(ends)] == sizes
    assert (ends[0], ends[-1]) == (0, images)


def test_probabilities_become_logits_of_the_same_probabilities() -> None:
    logits = np.random.default_rng(0).normal(size=(4, 10)).astype(np.float32)
    assert np.array_equal(logits_in(logits.astype(np.float64), "logits"), logits)
    given = softmax(logits)
    assert np.allclose(softmax(logits_in(given, "probabilities")), given, atol=1e-6)
    assert np.allclose(softmax(logits_in(given, "probabilities"), 1.7), softmax(logits, 1.7), atol=1e-6)
    sure = logits_in(np.eye(3, dtype=np.float32), "probabilities")
    assert np.isfinite(sure).all()
    for lie in (logits, given * 2, np.full((1, 2), np.nan), np.array([[2.0, -1.0]])):
        with pytest.raises(InvalidAnswer):
            logits_in(lie, "probabilities")


@pytest.mark.parametrize(
    ("flags", "flag"),
    [
        ({"engine": "oip"}, "needs .* --upstream"),
        ({"upstream": "http://10.0.0.9:8000"}, r"\(--upstream\) is for the engine oip, and the engine is onnx:"),
        (
            {"upstream_model": "x", "engine": "ray"},
            r"\(--upstream-model\) is for the engine oip, and the engine is ray:",
        ),
        ({"upstream_token_file": "/x"}, r"\(--upstream-token-file\) is for the engine oip, and the engine is onnx:"),
        ({"gpus": "1"}, r"\(--gpus\) is for the engine ray, and the engine is onnx:"),
        ({"replicas": "1"}, r"\(--replicas\) is for the engine ray, and the engine is onnx:"),
        (
            {"address": "auto", "engine": "oip", "upstream": "http://h:1"},
            r"\(--address\) is for the engine ray, and the engine is oip:",
        ),
        ({"engine": "oip", "upstream": "http://h:1/v2"}, "--upstream .* without /v2"),
        ({"engine": "oip", "upstream": "http://h:1/v2/models/x"}, "--upstream .* without /v2"),
        ({"engine": "oip", "upstream": "10.0.0.9:8000"}, "--upstream"),
        ({"engine": "tensorflow"}, "--engine"),
        ({"engine": "ray", "replicas": "8:1"}, "--replicas is '8:1': must be N or MIN:MAX"),
        ({"engine": "ray", "replicas": "0"}, "--replicas is '0': must be N or MIN:MAX"),
        ({"engine": "ray", "replicas": "1:"}, "--replicas is '1:': must be N or MIN:MAX"),
        ({"engine": "ray", "gpus": "-1"}, "--gpus"),
    ],
)
def test_wrong_settings_are_told(flags: dict[str, str], flag: str) -> None:
    with pytest.raises(SetupError, match=flag):
        load_settings(CloudSettings, flags=flags)


def test_the_largest_batch_is_what_all_replicas_take() -> None:
    settings = CloudSettings(engine="ray", replicas="1:8", threads=2, max_batch_size=10)
    assert (settings.replica_range, settings.batch_images) == ((1, 8), 160)
    assert CloudSettings(engine="ray", replicas="3").replica_range == (3, 3)


@pytest.mark.skipif(find_spec("ray") is not None, reason="the extra 'ray' is installed")
async def test_the_engine_ray_needs_its_extra() -> None:
    with pytest.raises(MissingExtra, match=r"\[ray\]"):
        await load_engine(CloudSettings(engine="ray"), load_manifest(), Lifecycle())


async def test_an_engine_holds_a_further_release_only_if_it_has_its_networks_already() -> None:
    manifest, settings = load_manifest(), CloudSettings(engine="oip", upstream="http://127.0.0.1:1")
    network = manifest.default_for("cloud")
    same = await load_next(settings, manifest, Loaded(models=frozenset({key_of(network)}), serving=True))
    assert same.models == (key_of(network),)
    assert not same.served.ready
    with pytest.raises(NeedsRestart, match="only when the node starts") as caught:
        await load_next(settings, manifest, Loaded(serving=True))
    assert caught.value.is_trouble


def test_a_node_imports_the_engine_that_it_uses_and_no_other() -> None:
    code = (
        "import sys, asyncio, cloud_node.__main__, end_node.__main__\n"
        "from cloud_node.settings import CloudSettings\n"
        "from end_node.settings import EndSettings\n"
        "CloudSettings().batch_images, EndSettings(source=['gate=rtsp://10.0.0.9/main'])\n"
        "kinds = ('cloud_node.engines.', 'end_node.sources.')\n"
        "print(*sorted(name for name in sys.modules if name.startswith(kinds)), 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, stdout=subprocess.PIPE, text=True)
    *imported, torch = done.stdout.split()
    assert not {"cloud_node.engines.oip", "cloud_node.engines.ray", "cloud_node.engines.onnx"} & set(imported)
    assert not {"end_node.sources.video", "end_node.sources.folder", "end_node.sources.snapshot"} & set(imported)
    assert torch == "False"
