"""What holds for the whole suite."""

import gc
from collections.abc import Generator, Iterator
from pathlib import Path

import certifi
import hypothesis
import pytest
from xdist.scheduler import LoadFileScheduling

import models.manifest
from tests import zygote
from tests.postgres import PostgresServer, running_server

_ONE_FLEET = ("tests/acceptance", "tests/browser")

# By default an example that takes more than 0.2 s fails: on a busy machine any of them may.
hypothesis.settings.register_profile("terrace", deadline=None)
hypothesis.settings.register_profile("long", deadline=None, max_examples=10_000)
hypothesis.settings.load_profile("terrace")


class _FilesAndOneFleet(LoadFileScheduling):  # type: ignore[misc]  # without types
    """Keep the tests of a file in one worker, like `--dist loadfile`, and also the tests of a folder with one fleet.

    A fleet takes six seconds of a core to start.
    """

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return next((folder for folder in _ONE_FLEET if file.startswith(f"{folder}/")), file)


def pytest_configure(config: pytest.Config) -> None:
    """Services are measured by `--cov` only if they start by themselves."""
    if not config.getoption("cov_source", default=None):
        zygote.install()


def pytest_unconfigure() -> None:
    """Nothing that the tests have started stays."""
    zygote.close()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LoadFileScheduling | None:
    return _FilesAndOneFleet(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect the tests without weights and without garbage collection.

    No test module may read the weights when it is imported: if the networks are missing, only the tests that need them
    fail. What collecting makes stays until the end. Frozen, it costs the collector nothing, which otherwise takes
    0.3 s to go through it.
    """
    gc.disable()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models.manifest, "__file__", "/where/nothing/is")
        collected = yield
    gc.freeze()
    gc.enable()
    return collected


@pytest.fixture(scope="session", autouse=True)
def _one_authority(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """For each of its clients httpx reads all public authorities, which takes 24 ms, and no test asks for one."""
    everybody = Path(certifi.where()).read_text(encoding="utf-8")
    first = tmp_path_factory.mktemp("authorities") / "first.pem"
    end = "-----END CERTIFICATE-----\n"
    first.write_text(everybody.partition(end)[0] + end, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(certifi, "where", lambda: str(first))
        yield


@pytest.fixture
def fresh_processes() -> Iterator[None]:
    """Services of this test start as they do outside tests; see `tests.zygote`."""
    with zygote.fresh_processes():
        yield


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """The event loop of asynchronous tests and fixtures, of any scope."""
    return "asyncio"


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL server; tests that kill it start it again."""
    with running_server() as server:
        if isinstance(server, str):
            pytest.skip(server)
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Of an empty database, of each kind."""
    if request.param == "sqlite":
        return f"sqlite+aiosqlite:///{tmp_path / 'jobs.db'}"
    return str(request.getfixturevalue("postgres").database())
