"""The command that a settings class becomes."""

from typing import ClassVar

import pytest
import typer
from typer.testing import CliRunner

from tierkit.errors import AddressUnavailable, PortInUse, SetupError
from tierkit.flags import command
from tierkit.settings import NodeSettings


class EdgeLike(NodeSettings):
    """Serve a made-up node."""

    service: ClassVar[str] = "edgelike"


class Needy(EdgeLike):
    """Serve a made-up node for something."""

    what_for: str
    """What for."""


def invoke(arguments: list[str], start: object) -> tuple[int, str]:
    app = typer.Typer()
    app.command()(command(EdgeLike, start))  # type: ignore[arg-type]  # tests pass small functions
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200", "TERM": "dumb"})
    return result.exit_code, result.output


def test_every_field_is_a_flag_with_its_documentation() -> None:
    code, output = invoke(["--help"], lambda _: 0)
    assert code == 0
    missing = [name for name in EdgeLike.model_fields if f"--{name.replace('_', '-')} " not in output]
    assert missing == ["token"]  # a secret: every process of the machine can read a command line
    assert "Serve a made-up node." in output
    assert "only this machine; 0.0.0.0 serves every interface" in output


def test_a_field_without_a_default_is_told_as_such() -> None:
    app = typer.Typer()
    app.command()(command(Needy, lambda _: 0))
    output = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200", "TERM": "dumb"}).output
    assert "Undefined" not in output
    assert "What for. Required." in output


def test_flags_reach_the_settings_and_the_exit_code_comes_back() -> None:
    seen: list[EdgeLike] = []

    def start(settings: EdgeLike) -> int:
        seen.append(settings)
        return 3

    code, _ = invoke(["--port", "80", "--model", "a,b", "--drain-s", "0.5"], start)
    assert code == 3
    assert (seen[0].port, seen[0].model, seen[0].drain_s) == (80, ("a", "b"), 0.5)


@pytest.mark.parametrize(("arguments", "value"), [([], False), (["--insecure"], True)])
def test_a_switch_takes_no_value(arguments: list[str], value: bool) -> None:
    seen: list[bool] = []

    def start(settings: EdgeLike) -> int:
        seen.append(settings.insecure)
        return 0

    assert invoke(arguments, start)[0] == 0
    assert seen == [value]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (SetupError, 2),  # a person must mend it: no use to start again
        (PortInUse, 75),
        (AddressUnavailable, 75),
    ],
)
def test_what_keeps_a_service_from_starting_is_one_sentence_and_an_exit_code(
    error: type[SetupError], expected: int
) -> None:
    def start(settings: EdgeLike) -> int:
        raise error("the reason")

    assert invoke([], start) == (expected, "terrace edgelike: the reason\n")


def test_a_wrong_flag_is_one_sentence_and_exit_code_2() -> None:
    code, output = invoke(["--port", "x"], lambda _: 0)
    assert code == 2
    assert output.count("\n") == 1
    assert "--port" in output


def test_an_unexpected_error_is_not_hidden() -> None:
    def start(settings: EdgeLike) -> int:
        raise ZeroDivisionError

    app = typer.Typer()
    app.command()(command(EdgeLike, start))
    with pytest.raises(ZeroDivisionError):
        CliRunner().invoke(app, [], catch_exceptions=False)
