"""Whatever is handed in becomes the body that the job API reads, and can be sent twice."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from python_multipart.multipart import FormParser

from tierkit.client.uploads import UploadBody, build_upload
from tierkit.errors import InvalidInput
from tierkit.wire.oip import BINARY_HEADER, decode_request, parse_header_length

PIXELS = np.random.default_rng(1).integers(0, 256, (3, 4, 4, 3), dtype=np.uint8)


async def sent(upload: UploadBody) -> bytes:
    body = b"".join([chunk async for chunk in upload.chunks()])
    assert len(body) == int(upload.headers["Content-Length"])
    return body


async def tensors(upload: UploadBody) -> dict[str, np.ndarray[Any, Any]]:
    body = await sent(upload)
    request = decode_request(body, parse_header_length(upload.headers[BINARY_HEADER]))
    return {tensor.name: tensor.data for tensor in request.inputs}


async def form(upload: UploadBody) -> tuple[dict[str, str], list[tuple[str, bytes]]]:
    """Fields and files, as the library of the scheduler reads them."""
    fields: dict[str, str] = {}
    files: list[tuple[str, bytes]] = []

    def on_file(file: Any) -> None:
        file.file_object.seek(0)
        files.append((file.file_name.decode(), file.file_object.read()))
        file.close()

    parser = FormParser(
        "multipart/form-data",
        lambda one: fields.update({(one.field_name or b"").decode(): (one.value or b"").decode()}),
        on_file,
        boundary=upload.headers["Content-Type"].partition("boundary=")[2],
    )
    parser.write(await sent(upload))
    parser.finalize()
    return fields, files


async def test_of_a_very_long_path_in_a_folder_the_end_is_sent(tmp_path: Path) -> None:
    deep = tmp_path.joinpath(*["é" * 100] * 15, "apple.png")
    deep.parent.mkdir(parents=True)
    deep.write_bytes(b"png")
    _, ((name, content),) = await form(build_upload(tmp_path, None, {}))
    assert content == b"png"
    assert deep.as_posix().endswith(name)
    assert 1020 <= len(name.encode()) <= 1024


async def test_an_array_goes_as_a_tensor_with_its_labels() -> None:
    upload = build_upload(PIXELS, [1, 2, 3], {"scheme": "mapping", "name": None})
    assert upload.params == {"scheme": "mapping"}
    found = await tensors(upload)
    np.testing.assert_array_equal(found["images"], PIXELS)
    assert found["labels"].dtype == np.int64
    assert found["labels"].tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(list, id="list of arrays"),
        pytest.param(lambda pixels: [Image.fromarray(one) for one in pixels], id="pictures"),
        pytest.param(lambda pixels: pixels[:, ::-1, :, :][:, ::-1], id="array that is not contiguous"),
    ],
)
async def test_arrays_of_any_make(make: Callable[[Any], Any]) -> None:
    np.testing.assert_array_equal((await tensors(build_upload(make(PIXELS), None, {})))["images"], PIXELS)


async def test_one_picture_is_a_batch_of_one() -> None:
    assert (await tensors(build_upload(PIXELS[0], None, {})))["images"].shape == (1, 4, 4, 3)


async def test_labels_by_name_go_in_a_form_beside_the_pixels() -> None:
    fields, files = await form(build_upload(PIXELS, ["apple", None, 4], {"batch_size": 2}))
    assert json.loads(fields.pop("labels")) == ["apple", None, 4]
    assert fields == {"batch_size": "2"}
    np.testing.assert_array_equal(np.load(io.BytesIO(files[0][1])), PIXELS)


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (PIXELS.astype(np.float32), None, "uint8"),
        (PIXELS[..., :1], None, "shape"),
        (PIXELS[:0], None, "no images"),
        ([], None, "no images"),
        ([PIXELS[0], PIXELS[1, :2]], None, "different sizes"),
        (Image.new("HSV", (4, 4)), None, "mode HSV"),
        ([Image.new("RGB", (4, 4)), Image.new("YCbCr", (4, 4))], None, "mode YCbCr"),
        ([Image.new("L", (4, 4))], None, "mode L"),
        (PIXELS, [1], "3 images came with 1 labels"),
        ("nowhere.png", None, "no such file"),
        ("x" * 5000 + ".png", None, r"^cannot read x+…x+\.png: File name too long$"),
        (["nowhere.png", 3], None, "int"),
        ([b"png", 3], None, "int"),
    ],
)
def test_what_cannot_be_sent_is_refused(images: Any, labels: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        build_upload(images, labels, {})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("b.PNG", "a.jpg", "deep/c.webp", ".hidden/d.png", "notes.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(name.encode())
    return tmp_path


async def test_a_folder_goes_file_by_file(folder: Path) -> None:
    upload = build_upload(folder, None, {"name": 'a "name"'})
    fields, files = await form(upload)
    assert fields == {"name": 'a "name"'}
    assert files == [("a.jpg", b"a.jpg"), ("b.PNG", b"b.PNG"), ("deep/c.webp", b"deep/c.webp")]
    assert await form(upload) == (fields, files), "a body must be the same when it is sent again"


async def test_paths_and_bytes_mix(folder: Path) -> None:
    _, files = await form(build_upload([folder / "notes.txt", b"raw"], None, {}))
    assert files == [("notes.txt", b"notes.txt"), ("image-1", b"raw")]


async def test_a_large_file_is_sent_in_pieces(tmp_path: Path) -> None:
    content = bytes(range(256)) * 10_000
    (tmp_path / "large.npz").write_bytes(content)
    upload = build_upload(tmp_path / "large.npz", None, {})
    assert len([chunk async for chunk in upload.chunks()]) > 1
    assert (await form(upload))[1] == [("large.npz", content)]


async def test_a_file_that_changes_meanwhile_is_an_error(folder: Path) -> None:
    upload = build_upload(folder / "a.jpg", None, {})
    (folder / "a.jpg").write_bytes(b"longer than before")
    with pytest.raises(InvalidInput, match="changed while it was sent"):
        await sent(upload)


def test_a_folder_without_pictures_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"no picture in .*\.png, "):
        build_upload(tmp_path, None, {})


async def test_files_may_be_given_names(folder: Path) -> None:
    _, files = await form(build_upload({"cam1/1.jpg": folder / "a.jpg", "2": b"raw"}, None, {}))
    assert files == [("cam1/1.jpg", b"a.jpg"), ("2", b"raw")]
    with pytest.raises(InvalidInput, match="is a folder"):
        build_upload({"all": folder}, None, {})


def test_what_is_left_out_of_a_folder_is_logged(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    build_upload(folder, None, {})
    assert [record.getMessage() for record in caplog.records] == [
        "left out: 2 files (1 hidden folder, with all that is in it, 1 .txt)"
    ]
