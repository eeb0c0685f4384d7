"""What holds for the whole suite."""

from collections.abc import Generator

import pytest

import models.manifest


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """No test module reads the weights when it is imported: while the tests are collected, there are none.

    Where the networks are missing, the tests that need them shall fail, each by itself, and not all of them.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models.manifest, "__file__", "/where/nothing/is")
        return (yield)
