"""A worker that waits for its host, and what it says about that."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tierkit.errors import Unavailable
from training.worker import patience
from training.worker.finding import at
from training.worker.patience import HostRetry

pytestmark = pytest.mark.anyio


async def test_a_host_that_comes_back_is_told_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "_FIRST_BACKOFF_S", 0.0)
    answers: Iterator[Exception | str] = iter([Unavailable("refused"), Unavailable("refused"), "here", "still here"])

    async def ask() -> str:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    retry = HostRetry(30.0, cast(Any, SimpleNamespace(url="", ticket=None)), at("http://127.0.0.1:1"))
    with caplog.at_level(logging.INFO, logger=patience.__name__):
        assert [await retry.have(ask), await retry.have(ask)] == ["here", "still here"]
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
