"""What a cloud node promises, whatever computes its networks."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from encryption.features import DTYPES, Features, features_tensor, pack
from models.manifest import load_manifest
from models.session import load_encoder
from models.split import FEATURES
from tests.integration.engines.running import ENCODER, NETWORK, RunningCloud, agree, cloud, local, sample
from tierkit.access import TokenEntry, digest_of, new_token, write_book
from tierkit.errors import SetupError, UpstreamError
from tierkit.types import FeatureForm
from tierkit.wire.oip import Tensor

# Ray itself gives warnings.
ON_RAY = (pytest.mark.ray, pytest.mark.filterwarnings("ignore"))


@asynccontextmanager
async def oip(**values: Any) -> AsyncIterator[RunningCloud]:
    async with cloud(node_id="upstream") as upstream, cloud(engine="oip", upstream=upstream.url, **values) as running:
        yield running


@pytest.fixture(params=["onnx", "oip", pytest.param("ray", marks=ON_RAY)])
def engine(request: Any) -> Any:
    if request.param == "ray":
        return partial(cloud, engine="ray", address=request.getfixturevalue("ray_cluster"))
    return {"onnx": cloud, "oip": oip}[request.param]


@pytest.fixture
async def running(engine: Any) -> AsyncIterator[RunningCloud]:
    async with engine() as running:
        yield running


async def test_it_answers_as_the_network_does(running: RunningCloud) -> None:
    images = sample(70)  # more than one request to an engine
    expected = local().run({"images": images}, ["logits", "probabilities"])
    agree(await running.infer(images), expected)
    agree(await running.infer(images[:1], urgent=True), {name: values[:1] for name, values in expected.items()})
    assert running.node.heartbeat().images_done == 71


async def test_it_takes_features_and_no_others_than_its_encoders(running: RunningCloud) -> None:
    images = sample(9)
    manifest = load_manifest()
    encoder = manifest.encoder(ENCODER)
    head = load_encoder(encoder, manifest.entry(NETWORK), "head")
    features = head.run({"images": images}, [FEATURES])[FEATURES]
    expected = local().run({"images": images}, ["probabilities"])["probabilities"]
    for form in DTYPES:
        values = pack(encoder, features, form)
        tensor = await features_tensor(Features(encoder=encoder, values=values))
        response = await running.infer(tensor, "probabilities", model=ENCODER)
        given = response.output("probabilities")
        assert given is not None
        assert (given.argmax(axis=1) == expected.argmax(axis=1)).mean() > 0.8
        lies = Tensor(FEATURES, values, {**tensor.parameters, "tail": "0" * 64})
        with pytest.raises(UpstreamError) as refused:
            await running.infer(lies, "probabilities", model=ENCODER)
        assert refused.value.status_code == 409
    assert {form.value for form in DTYPES} == {form.value for form in FeatureForm}


def encoders() -> set[str]:
    return {encoder.name for encoder in load_manifest().encoders if encoder.network == NETWORK}


async def test_it_says_of_itself_what_the_manifest_knows(running: RunningCloud) -> None:
    said = (await running.get(f"/v2/models/{NETWORK}")).json()
    model, entry = local(), load_manifest().entry(NETWORK)
    assert said["inputs"] == [{"name": "images", "datatype": "UINT8", "shape": [-1, 32, 32, 3]}]
    assert [each["name"] for each in said["outputs"]] == [each.name for each in model.outputs]
    assert said["parameters"]["sha256"] == entry.sha256
    assert said["parameters"]["temperature"] == entry.temperature
    offers = {offer.name: offer for offer in running.node.registration("http://127.0.0.1:9").models}
    assert offers.keys() == {NETWORK, *encoders()}
    assert offers[NETWORK].sha256 == entry.sha256
    assert all(offer.ms_per_image > 0 for offer in offers.values())
    assert offers[NETWORK].classes == offers[ENCODER].classes != ""


async def test_bad_requests_are_the_callers_fault(running: RunningCloud) -> None:
    for images in (np.zeros((1, 3, 32, 32), np.uint8), np.zeros((1, 32, 32, 3), np.float32)):
        with pytest.raises(UpstreamError) as refused:
            await running.infer(images)
        assert refused.value.status_code == 400
    agree(await running.infer(sample(2)), local().run({"images": sample(2)}, ["logits"]))


async def test_it_is_ready_and_measured(running: RunningCloud) -> None:
    assert await running.ready()
    beat = running.node.heartbeat()
    assert (beat.draining, beat.replicas) == (False, 1)
    await running.infer(sample(3))
    metrics = (await running.get("/metrics")).text
    assert f'terrace_queued_images{{model="{NETWORK}",tier="cloud"}} 0.0' in metrics
    assert f'terrace_compute_duration_seconds_count{{model="{NETWORK}",tier="cloud"}}' in metrics


async def test_it_asks_for_tokens(engine: Any, tmp_path: Path) -> None:
    token, book = new_token(), tmp_path / "tokens.toml"
    book.touch(mode=0o600)
    book.write_text(write_book([TokenEntry(name="alice", role="user", sha256=digest_of(token.encode()).hex())]))
    async with engine(tokens=book) as running:
        with pytest.raises(UpstreamError) as refused:
            await running.infer(sample(1))
        assert refused.value.status_code == 401
        await running.infer(sample(1), token=token)


async def test_it_can_serve_features_alone(engine: Any) -> None:
    async with engine(only_features=True) as running:
        offers = running.node.registration("http://127.0.0.1:9").models
        assert {offer.name for offer in offers} == encoders() >= {ENCODER}


async def test_it_knows_the_names_of_its_networks(engine: Any) -> None:
    with pytest.raises(SetupError, match="has no model 'nobody'"):
        async with engine(model=("nobody",)):
            pass
