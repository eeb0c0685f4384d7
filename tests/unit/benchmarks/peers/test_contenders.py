"""The list of contenders, and their environments."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks.peers.contenders import CONTENDERS, MLSERVER_JSON, TERRACE, choose
from benchmarks.peers.environments import installed_version, interpreter_of
from tierkit.errors import InvalidInput

FASTAPI = choose(["fastapi"])[0]


def test_all_or_the_named_ones_in_the_order_of_the_table() -> None:
    assert choose([]) == list(CONTENDERS)
    assert [contender.name for contender in choose(["pytriton", "terrace"])] == ["terrace", "pytriton"]
    with pytest.raises(InvalidInput, match="nope"):
        choose(["nope"])


@pytest.mark.parametrize("contender", CONTENDERS, ids=lambda contender: contender.name)
def test_a_contender_can_be_started(contender) -> None:
    filled = [word.format(port="1", model="m", weights="w") for word in contender.command]
    assert "-m" in filled or Path(filled[0]).is_file()
    # Everything but Terrace brings its own libraries, the runtime among them.
    assert ("onnxruntime" in contender.requirements) == (contender is not TERRACE)


def test_no_server_listens_beyond_loopback() -> None:
    folder = Path(next(word for word in FASTAPI.command if word.endswith(".py"))).parent
    for script in folder.glob("serve_*.py"):
        text = script.read_text()
        assert "0.0.0.0" not in text, script.name
        command = next(
            contender.command for contender in (*CONTENDERS, MLSERVER_JSON) if script.stem in "".join(contender.command)
        )
        assert "HOST" in text or "127.0.0.1" in command, script.name


def test_terrace_runs_in_its_own_environment(tmp_path: Path) -> None:
    assert interpreter_of(TERRACE, tmp_path) == Path(sys.executable)
    assert list(tmp_path.iterdir()) == []


def test_an_environment_is_made_once(tmp_path: Path) -> None:
    home = tmp_path / "fastapi"
    home.mkdir()
    marker = {"requirements": list(FASTAPI.requirements), "python": sys.version}
    (home / "terrace-peer.json").write_text(json.dumps(marker))
    assert interpreter_of(FASTAPI, tmp_path) == home / "bin" / "python"


def test_versions() -> None:
    assert installed_version(Path(sys.executable), "pytest") == pytest.__version__
    assert installed_version(Path(sys.executable), "no-such-distribution") == "unknown"
