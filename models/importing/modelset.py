"""The set that an import enters a network into: its content, and its changes, which are complete or do not happen."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from models.hierarchy import Hierarchy
from models.manifest import MANIFEST_NAME, Manifest, ModelEntry, load_manifest, merge_entry, save_manifest
from tierkit.atomic import alone_in, write_new
from tierkit.errors import InvalidInput, SetupError
from tierkit.types import Tier

__all__ = ["check_folder", "enter", "free_name", "hierarchy_of", "present"]

_NAME = re.compile(r"[^A-Za-z0-9._-]+")


def present(models: Path) -> Manifest | None:
    """Manifest of a set; None if the set does not exist yet."""
    return load_manifest(models) if (models / MANIFEST_NAME).is_file() else None


def check_folder(models: Path) -> None:
    """Refuse to begin a set among other files. Networks are allowed: an import may have been killed, or be running.

    Raises:
        InvalidInput: the folder holds such files.
    """
    if not models.is_dir() or (models / MANIFEST_NAME).is_file():
        return
    for path in models.iterdir():
        if path.suffix != ".onnx" and not path.name.startswith(".") and path.name != MANIFEST_NAME:
            raise InvalidInput(
                f"{models} holds {path.name!r} and no {MANIFEST_NAME}: name a model set, or a new folder"
            )


def enter(entry: ModelEntry, content: bytes, hierarchy: Hierarchy, models: Path) -> ModelEntry:
    """Write the network, then the manifest, and return the entry with the name of the file. Only the manifest makes the
    network part of the set, so the set stays whole if this is interrupted. Earlier files stay, because running services
    offer and load them.

    Raises:
        InvalidInput: the set was changed meanwhile, and this network no longer fits it.
        SetupError: a file cannot be written.
    """
    with alone_in(models):
        before = present(models)
        if before is not None and before.hierarchy != hierarchy:
            raise InvalidInput(f"{models} has got other classes meanwhile: import the network again")
        free_name(models, Tier(entry.tier), before, entry.name)
        for left in models.glob(".*.onnx.*"):  # of imports that were killed; no other writes now
            left.unlink(missing_ok=True)
        there = {path.name for path in models.iterdir()}
        entry = entry.model_copy(update={"file": write_new(models, f"{entry.name}.onnx", content)})
        after = Manifest(
            hierarchy=hierarchy.content(),
            data_source=before.data_source if before else "imported networks; their authors say what they learnt from",
            models=merge_entry(before.models if before else (), entry),
            encoders=tuple(one for one in (before.encoders if before else ()) if one.network != entry.name),
            tuned=before.tuned_without(entry.name) if before else (),
        )
        try:
            save_manifest(after, models)
        except SetupError:
            if entry.file not in there:
                (models / entry.file).unlink(missing_ok=True)
            raise
    return entry


def hierarchy_of(models: Path, before: Manifest | None, given: Path | None, labels: Sequence[str]) -> Hierarchy:
    """Return the classes of the set: from the given file, from the set itself, or without superclasses.

    Raises:
        DataError: the file is not a hierarchy.
        InvalidInput: the set has another one.
    """
    if given is not None:
        hierarchy = Hierarchy.load(given)
        if before is not None and before.hierarchy != hierarchy:
            raise InvalidInput(
                f"{models} has the hierarchy {before.hierarchy.name!r}, and {given} is another: begin a "
                "new set with --models"
            )
        return hierarchy
    if before is not None:
        return before.hierarchy
    return Hierarchy.flat(_NAME.sub("-", models.resolve().name) or "set", labels)


def free_name(file: Path, tier: Tier, before: Manifest | None, asked: str | None) -> str:
    """The name that was asked for, or one from the file; a network of another tier keeps its own."""
    stem = _NAME.sub("-", file.stem).strip("-._")[:80] or "network"
    name = asked or stem
    taken = {entry.name: entry.tier for entry in before.models} if before else {}
    if asked is None and taken.get(name, tier) != tier:
        name = f"{stem}-{tier}"
    if taken.get(name, tier) != tier:
        raise InvalidInput(f"the set has a network {name!r} on the {taken[name]} tier: give another one with --name")
    return name
