"""The error tree as drawn is the error tree as coded."""

import inspect
import re

import pytest

from tierkit import errors
from tierkit.distribution import install_command


def _drawn() -> dict[str, str]:
    """Parent by class name, read from the picture in the module docstring."""
    parents: dict[str, str] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"^(?P<indent>[ │├└─]*)(?P<name>[A-Z]\w+)(\s|$)", line)
        if not match or len(match["indent"]) % 4 or not match["indent"]:
            continue
        depth = len(match["indent"]) // 4 - 1
        path[depth:] = [match["name"]]
        if depth:
            parents[match["name"]] = path[depth - 1]
    return parents


def test_picture_matches_the_classes() -> None:
    classes = {
        name: cls.__bases__[0].__name__
        for name, cls in inspect.getmembers(errors, inspect.isclass)
        if issubclass(cls, errors.TerraceError) and cls is not errors.TerraceError
    }
    assert _drawn() == classes


def test_every_class_is_exported_and_documented() -> None:
    for name, cls in inspect.getmembers(errors, inspect.isclass):
        assert name in errors.__all__
        assert cls.__doc__


@pytest.mark.parametrize("cls", [errors.Unavailable, errors.Overloaded, errors.Draining, errors.NoNodeAvailable])
def test_unavailable_says_when_to_come_back(cls: type[errors.Unavailable]) -> None:
    assert cls("full", retry_after_s=2.5).retry_after_s == 2.5
    assert cls("full").retry_after_s > 0


def test_missing_extra_names_the_command() -> None:
    error = errors.MissingExtra("train", "Training")
    assert install_command("train") in str(error)
