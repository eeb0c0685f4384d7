"""The networks of a model set's folder, as the files of a release that a client sends to a scheduler."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio

from tierkit.client.uploads import UploadBody
from tierkit.errors import InvalidInput

__all__ = ["ModelSetFiles", "file_upload", "read_model_set"]

_log = logging.getLogger(__name__)

_MANIFEST, _TUNING = "manifest.json", "escalation.json"
_CHUNK_BYTES = 1 << 20
_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSetFiles:
    """Content of a model set's folder."""

    manifest: Mapping[str, Any]
    """Content of `manifest.json`."""
    tuning: Mapping[str, Any] | None
    """Content of `escalation.json`; None without thresholds, or if they belong to other networks."""
    files: Mapping[str, Path]
    """Files that the manifest names, by sha256."""


def read_model_set(folder: str | os.PathLike[str]) -> ModelSetFiles:
    """Read manifest and thresholds of a model set. The scheduler checks them; the networks are not opened here.

    Raises:
        InvalidInput: there is no readable manifest, or it names no files.
    """
    folder = Path(folder)
    manifest = _document(folder / _MANIFEST)
    files = {sha256: folder / name for name, sha256 in _named_files(manifest, folder / _MANIFEST)}
    tuning = _document(folder / _TUNING) if (folder / _TUNING).is_file() else None
    if tuning is not None and not _fits(tuning, manifest):
        _log.warning(
            f"{folder / _TUNING} was tuned for other networks, so the release gets no thresholds: run "
            "'terrace models tune-escalation' first if it should have some"
        )
        tuning = None
    return ModelSetFiles(manifest=manifest, tuning=tuning, files=files)


def file_upload(path: Path, sha256: str) -> UploadBody:
    """The content of a file as the body of a request.

    Raises:
        InvalidInput: the file cannot be read, or its content is another.
    """
    try:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
            length = file.tell()
    except OSError as exc:
        raise InvalidInput(f"cannot read {path}: {exc.strerror}") from exc
    if found != sha256:
        raise InvalidInput(f"{path} is damaged: its sha256 is {found}, in the manifest {sha256}")

    async def chunks() -> AsyncIterator[bytes]:
        sent = 0
        async with await anyio.open_file(path, "rb") as opened:
            while chunk := await opened.read(_CHUNK_BYTES):
                sent += len(chunk)
                if sent > length:
                    break
                yield chunk
        if sent != length:
            raise InvalidInput(f"{path} changed while it was sent")

    headers = {"Content-Type": "application/octet-stream", "Content-Length": str(length)}
    return UploadBody(headers=headers, chunks=chunks)


def _document(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except OSError as exc:
        raise InvalidInput(f"cannot read {path}: {exc.strerror}") from exc
    except (ValueError, RecursionError) as exc:
        raise InvalidInput(f"{path} holds no JSON: {exc}") from exc
    if not isinstance(content, dict):
        raise InvalidInput(f"{path} holds no JSON object")
    return content


def _named_files(manifest: Mapping[str, Any], path: Path) -> Iterator[tuple[str, str]]:
    """Name and sha256 of each file in a manifest."""
    try:
        parts = [encoder[side] for encoder in manifest.get("encoders", ()) for side in ("head", "tail")]
        named = [(str(part["file"]), str(part["sha256"])) for part in [*manifest["models"], *parts]]
    except (KeyError, TypeError) as exc:
        raise InvalidInput(f"{path} does not name the files of a model set") from exc
    for name, sha256 in named:
        # A name must not lead out of the folder: nothing else of this machine is sent.
        if not _PLAIN_NAME.fullmatch(name) or not _DIGEST.fullmatch(sha256):
            raise InvalidInput(f"{path} names a file {name!r} with sha256 {sha256!r}, which cannot be")
    return iter(named)


def _fits(tuning: Mapping[str, Any], manifest: Mapping[str, Any]) -> bool:
    """True if all thresholds are between networks of the manifest."""
    have = {(model["name"], model["sha256"]) for model in manifest["models"] if "name" in model}
    try:
        sides = [gate[side] for gate in tuning["gates"] for side in ("lower", "upper")]
        return all((side["name"], side["sha256"]) in have for side in sides)
    except (KeyError, TypeError):
        return True  # the scheduler says what is wrong
