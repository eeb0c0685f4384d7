"""Environments of other servers, made with pip."""

import dataclasses
from pathlib import Path

import pytest

from benchmarks.peers.contenders import CONTENDERS
from benchmarks.peers.environments import interpreter_of
from tierkit.errors import SetupError

FASTAPI = next(contender for contender in CONTENDERS if contender.name == "fastapi")


def test_what_cannot_be_installed_says_why_and_leaves_no_environment_that_counts(tmp_path: Path) -> None:
    contender = dataclasses.replace(FASTAPI, requirements=(str(tmp_path / "no-such-distribution"),))
    with pytest.raises(SetupError, match=r"naive FastAPI cannot be installed: .*no-such-distribution"):
        interpreter_of(contender, tmp_path)
    assert not (tmp_path / "fastapi" / "terrace-peer.json").exists()
