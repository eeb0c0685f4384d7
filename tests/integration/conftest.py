"""What holds for all tests with real sockets."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def _own_litter() -> Iterator[None]:
    """What a file's tests leave open comes to light at its end, and not in whatever test the collector runs next."""
    yield
    gc.collect()
