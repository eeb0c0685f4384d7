"""A stranger's ONNX file, read without trust: nothing in it is executed here, and only its own folder is read.

Needs the extra `import` (onnx).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
from google.protobuf.message import DecodeError
from onnx import TensorProto

from models.session import plain
from tierkit.errors import DataError

__all__ = ["first_line", "read_onnx"]

_MAX_BYTES = 2 * 1024**3 - 1
"""Largest size of a network, set by the file format."""
_OLDEST_OPSET, _NEWEST_IR = 7, 13
_MOST_NAMED = 5


def read_onnx(path: Path) -> onnx.ModelProto:
    """Read and check a network with all its weights.

    Raises:
        DataError: the file cannot be read, is not ONNX, is too large or damaged, or names weights in a file outside its
            folder.
    """
    try:
        if not path.is_file():
            raise DataError(f"cannot read {path}: it is {'not a file' if path.exists() else 'not there'}")
        size = path.stat().st_size
        if size > _MAX_BYTES:
            raise DataError(f"{path} has {size} bytes; a network may have {_MAX_BYTES}")
        content = path.read_bytes()
    except OSError as exc:
        raise DataError(f"cannot read {path}: {exc.strerror}") from exc
    model = onnx.ModelProto()
    try:
        model.ParseFromString(content)
    except DecodeError as exc:
        raise DataError(f"{path} is not an ONNX file: {exc}") from exc
    if not model.graph.node or not model.opset_import:
        raise DataError(f"{path} is not an ONNX file: it holds no graph")
    _load_external(model, path)
    versions = {entry.domain or "ai.onnx": entry.version for entry in model.opset_import}
    opset, newest = versions.get("ai.onnx", _OLDEST_OPSET), onnx.defs.onnx_opset_version()
    if not _OLDEST_OPSET <= opset <= newest or model.ir_version > _NEWEST_IR:
        raise DataError(
            f"{path} is of opset {opset} and IR version {model.ir_version}: export it with an opset from "
            f"{_OLDEST_OPSET} to {newest}, and IR version {_NEWEST_IR} or older"
        )
    if unknown := sorted({str(node.op_type) for node in model.graph.node if not _is_known(node, opset)}):
        named = ", ".join(unknown[:_MOST_NAMED]) + (" and others" if len(unknown) > _MOST_NAMED else "")
        raise DataError(
            f"{path} uses operators that opset {opset} of ONNX does not have: {named}; export it with another opset "
            f"(up to {newest}), or without them"
        )
    try:
        onnx.checker.check_model(model)
    except Exception as exc:  # the checker's own class, UnicodeDecodeError, and whatever its C++ raises
        raise DataError(f"{path} is damaged, or uses operators that ONNX does not know: {first_line(exc)}") from exc
    return model


def _is_known(node: onnx.NodeProto, opset: int) -> bool:
    """True if ONNX has the operator. Operators of other domains are left to ONNX Runtime to check."""
    if node.domain not in ("", "ai.onnx"):
        return True
    if not isinstance(node.op_type, str):  # bytes that are no UTF-8
        return False
    try:
        onnx.defs.get_schema(node.op_type, opset)
    except onnx.defs.SchemaError:
        return False
    return True


def _load_external(model: onnx.ModelProto, path: Path) -> None:
    """Read weights from files next to the network. In a cache of links such as Hugging Face's, these files may be links
    too, to files next to the network's real file.
    """
    folders = list(dict.fromkeys([path.parent.resolve(), path.resolve().parent]))
    outside = [tensor for tensor in _tensors(model) if tensor.data_location == TensorProto.EXTERNAL]
    found: dict[str, Path] = {}
    for location in dict.fromkeys(_location(tensor) for tensor in outside):
        found[location] = _place(path, location, folders)
    try:
        total = sum(place.stat().st_size for place in set(found.values()))
        if total > _MAX_BYTES:
            raise DataError(f"the weights of {path} have {total} bytes; a network may have {_MAX_BYTES}")
        for tensor in outside:
            place = found[_location(tensor)]
            for entry in tensor.external_data:
                if entry.key == "location":  # onnx follows no links
                    entry.value = place.name
            onnx.external_data_helper.load_external_data_for_tensor(tensor, str(place.parent))
            tensor.data_location = TensorProto.DEFAULT
            del tensor.external_data[:]
    except DataError:
        raise
    except Exception as exc:  # what odd offsets, lengths and types raise is not one family
        raise DataError(f"cannot read the weights of {path}: {first_line(exc)}") from exc


def _location(tensor: TensorProto) -> str:
    return next((entry.value for entry in reversed(tensor.external_data) if entry.key == "location"), "")


def _place(path: Path, location: str, folders: list[Path]) -> Path:
    """The file of that name in one of the folders.

    Raises:
        DataError: it is not there, or it, or what it is a link to, is outside of these folders.
    """
    inside, link = False, False
    for folder in folders:
        try:
            place = (folder / location).resolve()
            is_file = place.is_file()
        except (TypeError, ValueError, OSError) as exc:  # not UTF-8, with a NUL in it, too long
            raise DataError(f"{path} has weights in {location!r:.100}, which no file is called") from exc
        plain_name = location and not Path(location).is_absolute() and ".." not in Path(location).parts
        if plain_name and any(place.is_relative_to(each) and place != each for each in folders):
            inside = True
            if is_file:
                return place
        elif plain_name and is_file:
            link = True
    if link or not inside:
        more = ", and this is a link to another one: copy the file there" if link else ""
        raise DataError(f"{path} has weights in {location!r}: only files in its own folder are read{more}")
    raise DataError(f"{path} has weights in {location!r}, which is not there: put it next to the network")


def _tensors(message: Any) -> Iterator[TensorProto]:
    """All stored tensors, wherever in the file they are: in sub-graphs, attributes, functions or sparse tensors."""
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        for inner in [value] if hasattr(value, "ListFields") else value:
            if isinstance(inner, TensorProto):
                yield inner
            else:
                yield from _tensors(inner)


def first_line(exc: Exception) -> str:
    """Return the first line of a foreign library's error, as part of a sentence."""
    lines = str(exc).strip().splitlines()
    return (plain(lines[0]) if lines else type(exc).__name__)[:300]
