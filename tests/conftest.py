"""What holds for the whole suite."""

from collections.abc import Generator

import pytest
from xdist.scheduler import LoadFileScheduling

import models.manifest

_ACCEPTANCE = "tests/acceptance"


class _FilesAndOneFleet(LoadFileScheduling):  # type: ignore[misc]  # without types
    """As `--dist loadfile`, the tests of a file stay in one worker; and so do all that share the fleet of the
    acceptance tests, which takes six seconds of a core to start."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return _ACCEPTANCE if file.startswith(f"{_ACCEPTANCE}/") else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LoadFileScheduling | None:
    return _FilesAndOneFleet(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """No test module reads the weights when it is imported: while the tests are collected, there are none.

    Where the networks are missing, the tests that need them shall fail, each by itself, and not all of them.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models.manifest, "__file__", "/where/nothing/is")
        return (yield)
