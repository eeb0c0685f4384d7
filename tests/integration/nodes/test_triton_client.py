"""A stock Open Inference client finds everything that it expects."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import pytest
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from tritonclient.utils import InferenceServerException

from tierkit.testing import MadeModel

T = TypeVar("T")


async def with_client(running: Any, use: Callable[[triton.InferenceServerClient], T]) -> T:
    """Run `use` with a blocking client, in a thread of its own: the server runs in this one."""

    def work() -> T:
        with triton.InferenceServerClient(f"127.0.0.1:{running.port}", concurrency=4) as client:
            return use(client)

    return await asyncio.to_thread(work)


def images_input(array: np.ndarray, *, binary: bool = True) -> triton.InferInput:
    tensor = triton.InferInput("images", list(array.shape), "UINT8")
    tensor.set_data_from_numpy(array, binary_data=binary)
    return tensor


async def test_health_and_metadata(running: Any) -> None:
    def use(client: triton.InferenceServerClient) -> None:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("pixel")
        assert client.is_model_ready("pixel", MadeModel.sha256)
        assert not client.is_model_ready("nobody")
        server = client.get_server_metadata()
        assert server["name"] == "terrace-edge"
        assert server["extensions"] == [
            "binary_tensor_data",
            "classification",
            "statistics",
            "model_configuration",
            "model_repository",
        ]
        model = client.get_model_metadata("pixel")
        assert model["versions"] == [MadeModel.sha256]
        assert model["inputs"] == [{"name": "images", "datatype": "UINT8", "shape": [-1, 4, 4, 3]}]
        assert [output["name"] for output in model["outputs"]] == ["logits", "probabilities"]
        assert model["parameters"]["precision"] == "exact"

    await with_client(running, use)


async def test_config_and_statistics(running: Any) -> None:
    def use(client: triton.InferenceServerClient) -> None:
        config = client.get_model_config("pixel")
        assert config["max_batch_size"] == running.node.settings.batch_images
        assert config["input"] == [{"name": "images", "data_type": "TYPE_UINT8", "dims": [4, 4, 3]}]
        assert config["output"][0] == {"name": "logits", "data_type": "TYPE_FP32", "dims": [3]}
        for size in (1, 2, 2):
            client.infer("pixel", [images_input(running.model.images(*[(1, 2, 3)] * size))])
        for stats in (client.get_inference_statistics("pixel", MadeModel.sha256), client.get_inference_statistics()):
            (entry,) = stats["model_stats"]
            assert (entry["name"], entry["version"]) == ("pixel", MadeModel.sha256)
            assert (entry["inference_count"], entry["execution_count"]) == (5, 3)
            assert entry["inference_stats"]["success"]["count"] == 3
            assert entry["inference_stats"]["success"]["ns"] > entry["inference_stats"]["compute_infer"]["ns"] > 0
            assert [batch["batch_size"] for batch in entry["batch_stats"]] == [1, 2]

    await with_client(running, use)


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False])
async def test_infer(running: Any, binary_in: bool, binary_out: bool) -> None:
    array = running.model.images((9, 8, 7), (1, 2, 3))

    def use(client: triton.InferenceServerClient) -> triton.InferResult:
        wanted = [triton.InferRequestedOutput("logits", binary_data=binary_out)]
        return client.infer("pixel", [images_input(array, binary=binary_in)], outputs=wanted, request_id="my id")

    result = await with_client(running, use)
    assert result.as_numpy("logits").tolist() == [[9, 8, 7], [1, 2, 3]]
    assert result.as_numpy("probabilities") is None
    assert result.get_response()["id"] == "my id"
    assert result.get_response()["model_version"] == MadeModel.sha256


async def test_without_names_all_outputs_come(running: Any) -> None:
    array = running.model.images((255, 0, 51))
    result = await with_client(running, lambda client: client.infer("pixel", [images_input(array)]))
    assert result.as_numpy("logits").tolist() == [[255, 0, 51]]
    assert result.as_numpy("probabilities") == pytest.approx(np.array([[1, 0, 0.2]]))


@pytest.mark.parametrize("binary_out", [True, False])
async def test_classification(running: Any, binary_out: bool) -> None:
    array = running.model.images((51, 0, 255), (0, 102, 0))

    def use(client: triton.InferenceServerClient) -> triton.InferResult:
        wanted = [
            triton.InferRequestedOutput("probabilities", binary_data=binary_out, class_count=2),
            triton.InferRequestedOutput("logits", binary_data=binary_out, class_count=9),
        ]
        return client.infer("pixel", [images_input(array)], outputs=wanted)

    result = await with_client(running, use)
    texts = [[text if isinstance(text, str) else text.decode() for text in row] for row in result.as_numpy("logits")]
    assert texts == [
        ["255.000000:2", "51.000000:0", "0.000000:1"],
        ["102.000000:1", "0.000000:0", "0.000000:2"],
    ]
    top = result.as_numpy("probabilities")
    texts = [[text if isinstance(text, str) else text.decode() for text in row] for row in top]
    assert texts == [["1.000000:2:blue", "0.200000:0:red"], ["0.400000:1:green", "0.000000:0:red"]]


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
async def test_compression(running: Any, coding: str) -> None:
    array = running.model.images((51, 0, 255), (0, 102, 0))
    wanted = [triton.InferRequestedOutput("probabilities", class_count=1), triton.InferRequestedOutput("logits")]
    how = {"request_compression_algorithm": coding, "response_compression_algorithm": coding}

    def use(client: triton.InferenceServerClient) -> list[triton.InferResult]:
        return [client.infer("pixel", [images_input(array)], outputs=wanted, **how) for _ in range(3)]

    results = await with_client(running, use)
    async with triton_aio.InferenceServerClient(f"127.0.0.1:{running.port}") as client:
        results.append(await client.infer("pixel", [images_input(array)], outputs=wanted, **how))
    for result in results:
        assert result.as_numpy("logits").tolist() == [[51, 0, 255], [0, 102, 0]]
        assert result.as_numpy("probabilities").tolist() == [[b"1.000000:2:blue"], [b"0.400000:1:green"]]


async def test_errors_reach_the_caller_as_sentences(running: Any) -> None:
    def use(client: triton.InferenceServerClient) -> None:
        array = running.model.images((1, 2, 3))
        with pytest.raises(InferenceServerException, match="no model 'nobody' here; this node serves pixel"):
            client.infer("nobody", [images_input(array)])
        with pytest.raises(InferenceServerException, match="has no version '7'"):
            client.infer("pixel", [images_input(array)], model_version="7")
        with pytest.raises(InferenceServerException, match="not UINT8"):
            client.infer("pixel", [images_input(array[:, :2])])
        with pytest.raises(InferenceServerException, match="'sums'"):
            client.infer("pixel", [images_input(array)], outputs=[triton.InferRequestedOutput("sums")])
        with pytest.raises(InferenceServerException, match="internal error; request id"):
            client.infer("pixel", [images_input(running.model.images((255, 255, 255)))])

    await with_client(running, use)


async def test_many_requests_at_once(running: Any) -> None:
    def use(client: triton.InferenceServerClient) -> list[triton.InferResult]:
        pending = [
            client.async_infer("pixel", [images_input(running.model.images((value, 0, 0)))]) for value in range(100)
        ]
        return [request.get_result() for request in pending]

    results = await with_client(running, use)
    assert [result.as_numpy("logits")[0, 0] for result in results] == list(range(100))


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False])
@pytest.mark.parametrize("size", [1, 5])
async def test_the_asyncio_client(running: Any, binary_in: bool, binary_out: bool, size: int) -> None:
    batches = [[(value, 1, row) for row in range(size)] for value in range(40)]
    wanted = [triton_aio.InferRequestedOutput("logits", binary_data=binary_out)]
    async with triton_aio.InferenceServerClient(f"127.0.0.1:{running.port}") as client:
        assert await client.is_server_ready()
        results = await asyncio.gather(
            *(
                client.infer("pixel", [images_input(running.model.images(*batch), binary=binary_in)], outputs=wanted)
                for batch in batches
            )
        )
    assert [result.as_numpy("logits").tolist() for result in results] == [
        [list(pixel) for pixel in batch] for batch in batches
    ]
