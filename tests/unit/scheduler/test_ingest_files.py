"""Image files, arrays and archives: what is converted, what is refused, and with which words."""

from __future__ import annotations

import contextlib
import io
import pickle
import struct
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st
from PIL import Image

from models.manifest import Fit
from scheduler.ingest.arrays import read_header
from scheduler.ingest.collect import Collector
from scheduler.ingest.inputs import PixelWriter
from scheduler.ingest.labels import labels_from_array, labels_from_json
from scheduler.ingest.staging import Part, staged
from scheduler.settings import SchedulerSettings
from tierkit.errors import InvalidInput, TerraceError, TooLarge, UnsupportedMedia
from tierkit.wire.oip import InferRequest, Tensor, encode_request

SHAPE = (32, 32, 3)
FIT = Fit(32, 32)
LIMITS = SchedulerSettings(
    max_images=20, max_pixels=1_000_000, max_file_bytes=200_000, max_inflated_bytes=2_000_000, max_body_bytes=10_000_000
)


def limits(**changes: int) -> SchedulerSettings:
    return LIMITS.model_copy(update=changes)


FINE = ("apple", "bear", "cat")
RED = (200, 10, 20)


def encoded(image: Image.Image, form: str = "PNG", **options) -> bytes:
    held = io.BytesIO()
    image.save(held, form, **options)
    return held.getvalue()


def png(size: tuple[int, int] = (32, 32), colour: tuple[int, int, int] = RED) -> bytes:
    return encoded(Image.new("RGB", size, colour))


def npy(array: np.ndarray, **options) -> bytes:
    held = io.BytesIO()
    np.save(held, array, **options)
    return held.getvalue()


def npz(**arrays) -> bytes:
    held = io.BytesIO()
    np.savez(held, **arrays)
    return held.getvalue()


def zipped(*entries: tuple[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w", method) as archive:
        for name, data in entries:
            archive.writestr(name, data)
    return held.getvalue()


def images(count: int, size: tuple[int, int] = (32, 32)) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, (count, *size, 3), np.uint8)


class Collected:
    def __init__(
        self, tmp_path: Path, *files: tuple[str, bytes], limits: SchedulerSettings = LIMITS, strict: bool = True
    ) -> None:
        self.held = io.BytesIO()
        self.writer = PixelWriter(self.held, limits.max_images, "one job", FIT)
        self.collector = Collector(self.writer, limits, FINE)
        for name, data in files:
            with staged(tmp_path) as staging:
                staging.file.write(data)
                list(self.collector.add_file(staging, Part("images", name, 0, len(data))))
        for damage in self.collector.damaged.values() if strict else ():
            raise damage

    @property
    def names(self) -> list[str | None]:
        names = self.collector.unique_names()
        return [names.get(image) for image in range(self.writer.images)]

    @property
    def labels(self) -> list[int] | None:
        labels = self.collector.joined_labels(None)
        return None if labels is None else labels.tolist()


# --- arrays -----------------------------------------------------------------------------------------------------------


def test_npy_and_npz_are_told_by_their_content(tmp_path):
    pixels = images(3)
    found = Collected(tmp_path, ("a.bin", npy(pixels[:1])), ("b", npz(images=pixels[1:])))
    assert np.array_equal(np.frombuffer(found.held.getvalue(), np.uint8).reshape(pixels.shape), pixels)
    assert found.names == [None] * 3


def test_npz_brings_labels_and_names(tmp_path):
    data = npz(images=images(3), fine_labels=np.array([0, -1, 2]), names=np.array(["a/x.png", "b", "c"]))
    found = Collected(tmp_path, ("x.npz", data))
    assert found.labels == [0, -1, 2]
    assert found.names == ["a/x.png", "b", "c"]


def test_arrays_of_an_npz_that_are_not_read_are_counted(tmp_path):
    data = npz(images=images(1), fine_labels=np.array([0]), labels=np.array([0]), lables=np.array([1]), filenames=[""])
    assert sum(Collected(tmp_path, ("x.npz", data)).collector.left_out.values()) == 2


def test_npz_with_one_array_of_images_needs_no_name(tmp_path):
    found = Collected(tmp_path, ("x.npz", npz(data=images(2), labels=np.array(["bear", "cat"]))))
    assert found.writer.images == 2
    assert found.labels == [1, 2]


def test_arrays_of_another_size_are_resampled(tmp_path):
    found = Collected(tmp_path, ("one.png", png()), ("x.npy", npy(images(2, (40, 50)))))
    assert found.collector.resized == {1: (40, 50), 2: (40, 50)}


@pytest.mark.parametrize(("width", "height"), [(2**26, 1), (1, 2**26), (65_536, 3)])
def test_very_long_images_are_refused_by_the_header(tmp_path, width, height):
    many = limits(max_images=1, max_pixels=2**26, max_file_bytes=1, max_inflated_bytes=2**30, max_body_bytes=1)
    with pytest.raises(TooLarge, match="one image may have 65535 on a side"):
        Collected(tmp_path, ("long.npy", with_shape((1, height, width, 3))), limits=many)


class Evil:
    def __reduce__(self):
        return (pytest.fail, ("unpickled",))


@pytest.mark.parametrize("wrap", [lambda array: npy(array, allow_pickle=True), lambda array: npz(images=array)])
def test_nothing_is_ever_unpickled(tmp_path, wrap):
    with pytest.raises(InvalidInput, match="Python objects"):
        Collected(tmp_path, ("x", wrap(np.array([Evil()], dtype=object))))


def test_a_bare_pickle_is_no_image(tmp_path):
    with pytest.raises(UnsupportedMedia):
        Collected(tmp_path, ("x", pickle.dumps(Evil())))


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (images(2).astype(np.float32), "must be uint8, not float32"),
        (images(2)[0], r"must have the shape \[n, height, width, 3\], not \[32, 32, 3\]"),
        (images(2)[..., :2], "must have the shape"),
        (np.zeros((1, 0, 32, 3), np.uint8), "without pixels"),
        (np.asfortranarray(images(2)), "Fortran order"),
    ],
)
def test_a_wrong_array_is_refused(tmp_path, array, message):
    with pytest.raises(InvalidInput, match=message):
        Collected(tmp_path, ("x.npy", npy(array)))


def with_shape(shape: tuple[int, ...], payload: bytes = b"") -> bytes:
    held = io.BytesIO()
    np.lib.format.write_array_header_1_0(held, {"descr": "|u1", "fortran_order": False, "shape": shape})
    return held.getvalue() + payload


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (with_shape((2, 32, 32, 3), bytes(100)), InvalidInput, "cut short: its header promises 6044 bytes more"),
        (with_shape((1, 32, 32, 3), bytes(3073)), InvalidInput, "more bytes than its header says"),
        (with_shape((10**6, 32, 32, 3)), TooLarge, "bytes of pixels"),
        (with_shape((2**40, 2**20, 32, 3)), TooLarge, "pixels"),
        (with_shape((21, 32, 32, 3)), TooLarge, "more than 20 images"),
        (with_shape((1, 2000, 2000, 3)), TooLarge, "2000 x 2000 pixels"),
        (with_shape((-1, 32, 32, 3)), InvalidInput, "negative"),
        (b"\x93NUMPY\x01\x00\x10\x00{'descr': 1+1}  ", InvalidInput, "damaged .npy header"),
        (b"\x93NUMPY\x01\x00\xff\xff{", InvalidInput, "damaged .npy header"),
        (b"\x93NUMPY\x09\x00", UnsupportedMedia, "version 9.0"),
        (b"\x93NUMPY", UnsupportedMedia, "not a .npy file"),
    ],
)
def test_a_header_that_lies_is_found_before_memory_is_taken(tmp_path, data, error, message):
    with pytest.raises(error, match=message):
        Collected(tmp_path, ("x.npy", data))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (npz(a=np.zeros(3), b=np.zeros(3)), "no array called 'images', and none of a, b"),
        (npz(a=images(1), b=images(1)), "and 2 of a, b could be it"),
        (npz(images=images(2), labels=np.array([1])), "1 labels for 2 images"),
        (npz(images=images(1), labels=np.array([3])), "3 of image 0 is not a fine class; they go from 0 to 2"),
        (npz(images=images(1), labels=np.array([0.5])), "integers or names, not float64"),
        (npz(images=images(1), labels=np.array(["dog"])), "'dog' of image 0 is not a fine class"),
        (npz(images=images(2), names=np.array(["a"])), "2 strings are needed"),
    ],
)
def test_a_wrong_npz_is_refused(tmp_path, data, message):
    with pytest.raises(InvalidInput, match=message):
        Collected(tmp_path, ("x.npz", data))


# --- archives ---------------------------------------------------------------------------------------------------------


def test_a_zip_with_nested_folders(tmp_path):
    data = zipped(
        ("b/2.png", png()),
        ("a/deep/er/1.png", png((40, 40))),
        ("a/", b""),
        ("__MACOSX/a/._1.png", b"junk"),
        ("a/.DS_Store", b"junk"),
        ("a/.thumbnails/1.png", b"junk"),
        ("a/.2.png", b"junk"),
        ("notes.txt", b"hello"),
        ("a/Thumbs.db", b"junk"),
        ("README", b"hello"),
        ("a/3.JPG", encoded(Image.new("RGB", (32, 32), RED), "JPEG")),
    )
    found = Collected(tmp_path, ("x.zip", data))
    assert found.names == ["b/2.png", "a/deep/er/1.png", "a/3.JPG"]
    assert found.collector.resized == {1: (40, 40)}


@pytest.mark.parametrize("name", ["../evil.png", "a/../../evil.png", "/etc/evil.png", "C:evil.png", "..\\evil.png"])
def test_a_path_outside_the_root_is_refused(tmp_path, name):
    with pytest.raises(InvalidInput, match="leads outside the archive"):
        Collected(tmp_path, ("x.zip", zipped(("ok.png", png()), (name, png()))))


def test_a_link_is_refused(tmp_path):
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w") as archive:
        entry = zipfile.ZipInfo("link.png")
        entry.external_attr = 0o120777 << 16
        archive.writestr(entry, "/etc/passwd")
    with pytest.raises(InvalidInput, match=r"'link\.png' is a link"):
        Collected(tmp_path, ("x.zip", held.getvalue()))


@pytest.mark.parametrize("inner", ["inner.zip", "inner.tar.gz", "x.npz"])
def test_an_archive_in_the_archive_is_refused(tmp_path, inner):
    with pytest.raises(UnsupportedMedia, match="archive inside the archive"):
        Collected(tmp_path, ("x.zip", zipped(("ok.png", png()), (inner, zipped(("a.png", png()))))))


GENEROUS = limits(max_images=20, max_pixels=10**6, max_file_bytes=10**9, max_inflated_bytes=10**9, max_body_bytes=10**9)


def test_one_entry_that_grows_too_much_costs_the_others_nothing(tmp_path, monkeypatch):
    data = zipped(("a.png", png()), ("bomb.png", bytes(5_000_000)), ("notes.txt", bytes(5_000_000)), ("b.png", png()))
    unpacked = []
    opened = zipfile.ZipFile.open

    def noted(archive, entry):
        unpacked.append(entry.filename)
        return opened(archive, entry)

    monkeypatch.setattr(zipfile.ZipFile, "open", noted)
    found = Collected(tmp_path, ("x.zip", data), limits=GENEROUS, strict=False)
    assert found.names == ["a.png", "bomb.png", "b.png"]
    ((image, error),) = found.collector.damaged.items()
    assert (image, type(error)) == (1, TooLarge)
    assert unpacked == ["a.png", "b.png"]


def test_an_npz_that_grows_too_much_is_refused(tmp_path):
    held = io.BytesIO()
    np.savez_compressed(held, images=np.zeros((20, 300, 300, 3), np.uint8))
    with pytest.raises(TooLarge, match="zip bomb"):
        Collected(tmp_path, ("x.npz", held.getvalue()), limits=GENEROUS, strict=False)


def test_a_zip_bomb_is_refused_by_its_directory(tmp_path):
    with pytest.raises(TooLarge, match="zip bomb"):
        Collected(tmp_path, ("x.zip", zipped(("bomb.png", bytes(5_000_000)))), limits=GENEROUS)
    with pytest.raises(TooLarge, match=r"'bomb\.png' has 300000 bytes"):
        Collected(tmp_path, ("x.zip", zipped(("bomb.png", bytes(300_000)))))
    with pytest.raises(TooLarge, match="unpacks to 2700000 bytes"):
        Collected(tmp_path, ("x.zip", zipped(*((f"{k}.png", bytes(150_000)) for k in range(18)))))
    with pytest.raises(TooLarge, match="more than the 40 entries"):
        Collected(tmp_path, ("x.zip", zipped(*((f"{k}.png", b"") for k in range(41)))))


def test_a_directory_that_lies_about_a_size_is_found(tmp_path):
    data = bytearray(zipped(("a.png", png()), method=zipfile.ZIP_STORED))
    size = len(png())
    at = data.rindex(b"PK\x01\x02") + 24
    assert struct.unpack_from("<I", data, at)[0] == size
    struct.pack_into("<I", data, at, size - 5)
    with pytest.raises(InvalidInput, match=r"'a\.png' (is damaged|has another length)"):
        Collected(tmp_path, ("x.zip", bytes(data)))


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (zipped(("notes.txt", b"hello")), InvalidInput, r"x\.zip: no picture in it"),
        (zipped((".hidden.png", png()), ("a/", b"")), InvalidInput, r"x\.zip: no picture in it"),
        (zipped(), InvalidInput, r"x\.zip: no picture in it"),
        (zipped(("notes.png", b"hello")), UnsupportedMedia, r"notes\.png: not a PNG"),
        (zipped(("a.png", png()))[:-30], UnsupportedMedia, "not a zip file, or damaged"),
        (b"PK\x03\x04" + bytes(40), UnsupportedMedia, "not a zip file"),
        (b"", InvalidInput, "an empty file"),
    ],
)
def test_a_wrong_zip_is_refused(tmp_path, data, error, message):
    with pytest.raises(error, match=message):
        Collected(tmp_path, ("x.zip", data))


def test_every_truncation_of_a_zip_is_refused_in_our_words(tmp_path):
    whole = zipped(("a.png", png()), ("b.png", png()))
    for length in range(0, len(whole), 7):
        with pytest.raises(InvalidInput):
            Collected(tmp_path, ("x.zip", whole[:length]))


def test_an_encrypted_zip_is_refused(tmp_path):
    data = bytearray(zipped(("a.png", png())))
    data[data.rindex(b"PK\x01\x02") + 8] |= 1
    with pytest.raises(InvalidInput, match="is encrypted"):
        Collected(tmp_path, ("x.zip", bytes(data)))


def damaged_zips(draw: st.DrawFn) -> bytes:
    """An archive of images or of arrays, by any method, with a few bytes changed, most of them in the directory."""
    method = draw(st.sampled_from([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA]))
    if draw(st.booleans()):
        whole = zipped(("a.png", png()), ("b/c.png", png((40, 40))), method=method)
    else:
        whole = zipped(("images.npy", npy(images(2))), ("labels.npy", npy(np.array([0, 1]))), method=method)
    data = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(whole) - 1) | st.integers(max(0, len(whole) - 200), len(whole) - 1))
        data[at : at + 4] = draw(st.binary(min_size=1, max_size=4) | st.sampled_from([bytes(4), b"\xff" * 4]))
    return bytes(data[: draw(st.just(len(data)) | st.integers(0, len(data)))])


@given(data=st.composite(damaged_zips)())
def test_a_damaged_archive_is_refused_in_words_and_never_with_another_error(data):
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(TerraceError):
        Collected(Path(folder), ("x", data))


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA], ids=["bzip2", "lzma"])
def test_methods_whose_unpacked_size_has_no_bound_are_refused(tmp_path, method):
    for name, content in (("a.png", png()), ("images.npy", npy(images(1)))):
        with pytest.raises(
            UnsupportedMedia, match=r"compressed by method [0-9]+; 0 .stored. and 8 .deflated. are read"
        ):
            Collected(tmp_path, ("x.zip", zipped((name, content), method=method)))


def changed_directory(data: bytes, field: int, form: str, value: int) -> bytes:
    """With another number in the directory's last entry."""
    changed = bytearray(data)
    struct.pack_into(form, changed, data.rindex(b"PK\x01\x02") + field, value)
    return bytes(changed)


@pytest.mark.parametrize("name", ["a.png", "images.npy"])
@pytest.mark.parametrize(
    ("field", "form", "value", "message"),
    [
        (10, "<H", 77, "compressed by method 77"),
        (42, "<I", 5, "damaged"),
        (42, "<I", 2**32 - 2, "damaged"),
        (8, "<H", 0x20, "damaged"),
        (16, "<I", 7, "damaged"),
        (6, "<H", 99, "damaged"),
    ],
    ids=["method", "offset", "offset beyond the end", "patched", "sum", "version"],
)
def test_a_directory_that_lies(tmp_path, name, field, form, value, message):
    whole = zipped((name, png() if name == "a.png" else npy(images(1))))
    with pytest.raises(InvalidInput, match=message):
        Collected(tmp_path, ("x.zip", changed_directory(whole, field, form, value)))


def test_entries_that_share_their_bytes_are_refused(tmp_path):
    whole = zipped(("a.png", png()), ("b.png", png()), method=zipfile.ZIP_STORED)
    with pytest.raises(InvalidInput, match=r"'a\.png' and 'b\.png' overlap"):
        Collected(tmp_path, ("x.zip", changed_directory(whole, 42, "<I", 0)))


def test_a_zero_byte_in_a_name_is_refused(tmp_path):
    data = zipped(("a.pngXb", png())).replace(b"a.pngXb", b"a.png\0b")
    with pytest.raises(InvalidInput, match="holds a zero byte"):
        Collected(tmp_path, ("x.zip", data))


@pytest.mark.parametrize(
    "name",
    ["a\x1b[31m\n\t.png", "=1+1.png", "-2.png", " a\u202fb \u200d.png", "a,b;c.png", "\U0001f98a/ä.png", "a\\b.png"],
)
def test_names_come_back_as_they_were_sent(tmp_path, name):
    assert Collected(tmp_path, (name, png())).names == [name]
    if "\\" not in name:
        assert Collected(tmp_path, ("x.zip", zipped((name, png())))).names == [name]


def test_images_of_the_same_name_are_refused(tmp_path):
    with pytest.raises(InvalidInput, match=r"the same name.*'a\.png'"):
        Collected(tmp_path, ("a.png", png()), ("b.png", png()), ("./a.png", png())).names  # noqa: B018
    with pytest.raises(InvalidInput, match="the same name"):
        Collected(tmp_path, ("x.zip", zipped(("cam1/a.png", png()), ("cam1\\a.png", png())))).names  # noqa: B018


def test_archives_with_the_same_names_inside_are_told_apart(tmp_path):
    first, second = zipped(("1.png", png()), ("2.png", png())), zipped(("1.png", png()))
    assert Collected(tmp_path, ("cam1.zip", first), ("3.png", png()), ("cam2.zip", second)).names == [
        "cam1/1.png",
        "cam1/2.png",
        "3.png",
        "cam2/1.png",
    ]
    with pytest.raises(InvalidInput, match="the same name"):
        Collected(tmp_path, ("cam1.zip", first), ("cam1.zip", second)).names  # noqa: B018


def test_backslashes_in_a_zip_mean_folders(tmp_path):
    data = zipped(("cam1\\", b""), ("cam1\\deep\\1.png", png()), ("cam2\\.hidden\\1.png", png()), ("cam2/1.png", png()))
    found = Collected(tmp_path, ("x.zip", data))
    assert found.names == ["cam1/deep/1.png", "cam2/1.png"]
    assert found.collector.left_out == {"hidden": 1}


def test_names_in_utf8_without_the_flag(tmp_path):
    data = zipped(("ä.png", png()))
    # As the archiver of macOS leaves them: bit 11 is not set.
    for at, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        place = data.index(at) + flags
        data = data[: place + 1] + bytes([data[place + 1] & ~8]) + data[place + 2 :]
    assert Collected(tmp_path, ("x.zip", data)).names == ["ä.png"]


def test_what_is_left_out_of_a_zip_is_counted(tmp_path):
    entries = ("a.jfif", "b.JPE", "c", "d.txt", "e.TXT", ".f.png", "README", "__MACOSX/._a.png", "g.mp4")
    data = zipped(*((name, b"text" if name == "README" else png()) for name in entries))
    found = Collected(tmp_path, ("x.zip", data))
    assert found.names == ["a.jfif", "b.JPE", "c"]
    assert found.collector.left_out == {".txt": 2, "hidden": 2, "without a suffix, and no picture": 1, ".mp4": 1}


def test_more_images_than_the_limit(tmp_path):
    with pytest.raises(TooLarge, match="more than 20 images"):
        Collected(tmp_path, *((f"{k}.png", png()) for k in range(21)))


# --- tensors and labels -----------------------------------------------------------------------------------------------


def tensor(tmp_path: Path, *tensors: Tensor) -> Collector:
    chunks, headers = encode_request(InferRequest(inputs=tensors))
    collector = Collector(PixelWriter(io.BytesIO(), 20, "one job", FIT), LIMITS, FINE)
    with staged(tmp_path) as staging:
        for chunk in chunks:
            staging.file.write(chunk)
        part = Part("images", "tensor", 0, staging.file.tell())
        list(collector.add_tensor(staging, part, int(headers["Inference-Header-Content-Length"])))
    return collector


def test_a_tensor_with_labels(tmp_path):
    collector = tensor(tmp_path, Tensor("images", images(2)), Tensor("labels", np.array([1, -1])))
    labels = collector.joined_labels(None)
    assert labels is not None
    assert labels.tolist() == [1, -1]


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ((Tensor("pictures", images(1)),), "the tensors are pictures; 'images' is needed"),
        ((Tensor("images", images(1)), Tensor("mask", images(1))), "the tensors are images, mask"),
        ((Tensor("images", images(1).astype(np.float32)),), "must be uint8, not float32"),
        ((Tensor("images", images(1)[0]),), "must have the shape"),
        ((Tensor("images", images(2)), Tensor("labels", np.array([1]))), "1 labels for 2 images"),
    ],
)
def test_a_wrong_tensor_is_refused(tmp_path, tensors, message):
    with pytest.raises(InvalidInput, match=message):
        tensor(tmp_path, *tensors)


def test_labels_by_name_number_and_null():
    assert labels_from_json('["cat", 0, null]', FINE, images=3).tolist() == [2, 0, -1]
    assert labels_from_array(np.array([2, -1], np.int8), FINE, 2).tolist() == [2, -1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('["kat"]', "'kat' of image 0 is not a fine class; did you mean 'cat'"),
        ("[3]", "numbers go from 0 to 2"),
        ("[-1]", "numbers go from 0 to 2"),
        ("[true]", "'True' of image 0"),
        ("[1.5]", "'1.5' of image 0"),
        ('{"a": 1}', "must be a JSON list"),
        ("[1", "not a JSON list"),
        ("[[]]", "must be a JSON list with one name, number or null per image"),
        ("[" * 1000, "must be a JSON list with one name, number or null per image"),
        ('[{"a": 1}]', "must be a JSON list with one name, number or null per image"),
        ("[" + "1" * 1000 + "]", "numbers go from 0 to 2"),
        ("[" + "1," * 2000 + "1]", "4003 characters of JSON for 1 images"),
    ],
)
def test_wrong_labels_are_named(text, message):
    with pytest.raises(InvalidInput, match=message):
        labels_from_json(text, FINE, images=1)


def test_labels_are_counted_before_they_are_looked_at(tmp_path):
    # 4 bytes each in the file, a hundred in memory.
    many = npz(images=images(1), labels=np.full(2_000_000, "?"))
    generous = limits(max_images=1, max_pixels=10**6, max_file_bytes=1, max_inflated_bytes=10**8, max_body_bytes=10**8)
    with pytest.raises(InvalidInput, match="2000000 labels for 1 images"):
        Collected(tmp_path, ("x.npz", many), limits=generous)


def test_labels_come_from_one_place(tmp_path):
    found = Collected(tmp_path, ("x.npz", npz(images=images(1), labels=np.array([0]))))
    with pytest.raises(InvalidInput, match="given twice"):
        found.collector.joined_labels(np.array([0], np.int32))
    plain = Collected(tmp_path, ("a.png", png()))
    with pytest.raises(InvalidInput, match="2 for 1 images"):
        plain.collector.joined_labels(np.array([0, 1], np.int32))


def test_labels_of_some_files_leave_the_others_unknown(tmp_path):
    found = Collected(tmp_path, ("a.png", png()), ("x.npz", npz(images=images(2), labels=np.array([0, 1]))))
    assert found.labels == [-1, 0, 1]


def npy_of(header: bytes, data: bytes = b"", *, version: tuple[int, int] = (1, 0)) -> bytes:
    length = struct.pack("<H" if version == (1, 0) else "<I", len(header))
    return b"\x93NUMPY" + bytes(version) + length + header + data


@pytest.mark.parametrize(
    "header",
    [
        b"{'descr':'|u1','fortran_order':False,'shape':(" + b"(" * 5000,
        b"{'descr':'|u1','fortran_order':False,'shape':" + b"-" * 9000 + b"1}",
        b"{'descr':'|u1','fortran_order':False,'shape':(1,\"\"\"",
        b"{'descr':'|u1','fortran_order':False,'shape':(1,2L\n\t 3",
        b"{'descr':['\xff'],'fortran_order':False,'shape':()}",
        b"{'descr':'|u1','fortran_order':False,'shape':(1,)}\0",
        b"{1:2}",
        b"{'descr':print(1),'fortran_order':False,'shape':(1,)}",
        b"",
    ],
    ids=["parentheses", "minus", "open string", "python 2", "not a type", "zero byte", "other keys", "a call", "empty"],
)
def test_a_header_that_no_parser_can_read(header: bytes):
    with pytest.raises(InvalidInput) as caught:
        read_header(io.BytesIO(npy_of(header)), "x.npy")
    # Nothing of what the parser says: it names objects of this process, and where they lie.
    assert str(caught.value) == "x.npy: damaged .npy header; it must hold descr, fortran_order and shape"


def test_a_long_header_is_refused_before_it_is_parsed():
    with pytest.raises(InvalidInput, match=r"damaged \.npy header"):
        read_header(io.BytesIO(npy_of(b"(" * 65_535)), "x.npy")


@pytest.mark.parametrize("version", [2, 3])
def test_a_header_that_may_have_gigabytes_is_not_read(version: int):
    file = io.BytesIO(b"\x93NUMPY" + bytes([version, 0]) + struct.pack("<I", 2**32 - 1) + bytes(1000))
    with pytest.raises(UnsupportedMedia, match=rf"version {version}\.0 is not read"):
        read_header(file, "x.npy")
    assert file.tell() == 8


_PIECES = (
    b"(",
    b")",
    b"[",
    b"]",
    b"{",
    b"}",
    b"'",
    b'"',
    b",",
    b":",
    b"-",
    b"\\",
    b"\n",
    b"\0",
    b"\xff",
    b"L",
    b"True",
)


@st.composite
def damaged_headers(draw: st.DrawFn) -> bytes:
    """A good header with a few pieces cut out, put in or many times repeated."""
    descr = draw(st.sampled_from([b"'|u1'", b"'<U4'", b"'<i8'", b"'<U0'", b"'|V0'", b"'<M8[s]'", b"[('a','<i4')]"]))
    shape = draw(st.sampled_from([b"()", b"(2,)", b"(1,32,32,3)", b"(0,2)", b"(-1,)", b"(%d,0)" % 10**30]))
    header = b"{'descr': %b, 'fortran_order': False, 'shape': %b, }\n" % (descr, shape)
    for _ in range(draw(st.integers(0, 3))):
        at, cut = draw(st.integers(0, len(header))), draw(st.integers(0, 10))
        put = draw(st.sampled_from(_PIECES) | st.binary(max_size=4)) * draw(st.sampled_from([0, 1, 2, 300, 5000]))
        header = (header[:at] + put + header[at + cut :])[:60_000]
    return header


@pytest.mark.filterwarnings("ignore")  # numpy's and Python's parsers warn of odd headers
@settings(deadline=None)  # numpy's parser takes quadratic time: some 0.2 s for the longest header that is read
@given(header=damaged_headers(), data=st.binary(max_size=64), version=st.sampled_from([(1, 0), (2, 0)]))
@example(header=b"{'descr':'<U1','fortran_order':False,'shape':(1,)}", data=b"\xff" * 4, version=(1, 0))
@example(header=b"{'descr':'<U0','fortran_order':False,'shape':(1,)}", data=b"", version=(1, 0))
@example(header=b"{'descr':'<i4','fortran_order':False,'shape':(%d,0)}" % 2**70, data=b"", version=(1, 0))
def test_a_damaged_array_is_refused_in_words_and_never_with_another_error(header, data, version):
    whole = npy_of(header, data, version=version)
    for upload in (whole, zipped(("images.npy", whole)), zipped(("images.npy", npy(images(1))), ("labels.npy", whole))):
        with tempfile.TemporaryDirectory() as folder, contextlib.suppress(TerraceError):
            Collected(Path(folder), ("x", upload))
