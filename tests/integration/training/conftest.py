"""A run of a tiny network on tiny images, and hosts that keep it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.shapes import write_shapes

pytest.importorskip("torch", reason="needs the extra 'train' (torch)")

from tierkit.http.lifecycle import Lifecycle
from tierkit.testing import serve_app
from training.host.app import create_app
from training.host.host import Host
from training.host.opening import open_host
from training.host.settings import HostSettings

CONFIG = """
name = "net"
tier = "end"
target = "fine"
epochs = {epochs}
batch_size = 6
peak_rate = 0.05
weight_decay = 1e-4
held_out_per_class = 2
precision = "fp32"
crop_padding = 0

[network]
kind = "mlp"
options = {{ inputs = 3072, hidden = [8], activation = "tanh" }}
"""
"""5 steps an epoch."""


@pytest.fixture(scope="session")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set."""
    return write_shapes(tmp_path_factory.mktemp("shapes"))


@pytest.fixture
def network(tmp_path: Path) -> Callable[..., Path]:
    """Writes a configuration of so many epochs."""

    def write(epochs: int, hidden: int = 8) -> Path:
        path = tmp_path / "net.toml"
        path.write_text(CONFIG.format(epochs=epochs).replace("[8]", f"[{hidden}]"))
        return path

    return write


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningHost:
    """A host in this process, and a client for it."""

    host: Host
    lifecycle: Lifecycle
    http: httpx.AsyncClient

    @property
    def url(self) -> str:
        return self.lifecycle.url


StartHost = Callable[..., AbstractAsyncContextManager[RunningHost]]


@pytest.fixture
def start_host(tmp_path: Path, shapes: Path, network: Callable[..., Path]) -> StartHost:
    """Serves a run of a few epochs; further settings as `HostSettings`."""

    @asynccontextmanager
    async def start(
        epochs: int = 2, folder: str = "run", hidden: int = 8, **given: object
    ) -> AsyncIterator[RunningHost]:
        own = {"network": str(network(epochs, hidden)), "dataset": str(shapes)}
        settings = HostSettings(folder=tmp_path / folder, port=0, **{**own, **given})  # type: ignore[arg-type]
        host = open_host(settings)
        service = settings.model_copy(update={"drain_s": 1.0})
        async with (
            serve_app(lambda lifecycle: create_app(host, lifecycle), service) as lifecycle,
            httpx.AsyncClient(base_url=lifecycle.url, timeout=30) as http,
        ):
            yield RunningHost(host=host, lifecycle=lifecycle, http=http)

    return start
