"""`terrace token`, on a file."""

import json
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from terrace.cli import _COMMANDS, _load, run
from tierkit.access import digest_of, read_book, read_token
from tierkit.types import Tier


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TERRACE_TOKENS", raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


BOOK = Path(".terrace/tokens.toml")
ALICE = ["token", "create", "--name", "alice", "--role", "user"]


def test_a_token_is_printed_once_and_only_its_hash_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*ALICE, "--expires", "30d", "--unfinished-jobs", "3"]) == 0
    out, err = capsys.readouterr()
    token = out.strip()
    assert token.startswith("terrace_")
    assert token not in err
    assert "it is shown this once" in err
    (entry,) = read_book(BOOK)
    assert entry.sha256 == digest_of(token.encode()).hex()
    assert entry.expires is not None
    assert entry.created is not None
    assert ((entry.expires - entry.created).days, entry.unfinished_jobs) == (30, 3)
    for command in (["token", "list"], ["token", "list", "--json"]):
        assert run(command) == 0
        shown = capsys.readouterr().out
        assert "alice" in shown
        assert entry.id in shown
        assert entry.sha256 not in shown
        assert token not in shown
    assert json.loads(shown)["tokens"][0]["unfinished_jobs"] == 3


def test_a_token_goes_into_a_file_of_its_holders_alone(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["token", "create", "--name", "pi", "--role", "node", "--node", "pi-*", "--tier", "end"]
    assert run([*command, "--out", "pi.token"]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert "it is in pi.token and nowhere else" in err
    assert "shown" not in err
    assert Path("pi.token").stat().st_mode & 0o777 == 0o600
    (entry,) = read_book(BOOK)
    assert entry.sha256 == digest_of(read_token(Path("pi.token")).encode()).hex()
    assert (entry.nodes, entry.tiers) == (("pi-*",), (Tier.END,))
    # Neither is there anything to take back when the token cannot be handed over.
    assert run(["token", "create", "--name", "bob", "--role", "user", "--out", "pi.token"]) == 2
    assert "cannot write the token into pi.token: File exists" in capsys.readouterr().err
    assert [entry.name for entry in read_book(BOOK)] == ["pi"]


def test_a_node_may_have_a_limit_of_observations(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["token", "create", "--name", "camera", "--role", "node", "--observations-per-minute", "6000"]
    assert run(command) == 0
    assert read_book(BOOK)[0].observations_per_minute == 6000
    capsys.readouterr()
    assert run(["token", "list"]) == 0
    assert "6,000 observations a minute" in capsys.readouterr().out
    assert run([*ALICE, "--observations-per-minute", "6000"]) == 2
    assert "--observations-per-minute is not for tokens of the role user" in capsys.readouterr().err


def test_a_token_may_be_for_some_sites(capsys: pytest.CaptureFixture[str]) -> None:
    node = ["token", "create", "--name", "shop-7", "--role", "node"]
    assert run([*node, "--site", "shop-7"]) == 0
    assert run([*ALICE, "--site", "shop-7", "--site", "shop-8"]) == 0
    assert [entry.sites for entry in read_book(BOOK)] == [("shop-7",), ("shop-7", "shop-8")]
    capsys.readouterr()
    assert run(["token", "list"]) == 0
    of_node, of_alice = (line.rstrip() for line in capsys.readouterr().out.splitlines()[-2:])
    assert of_node.endswith("shop-7, shop-7-*, site shop-7")
    assert of_alice.endswith("  sites shop-7, shop-8")
    assert run(["token", "rotate", "alice", "--out", "new.token"]) == 0
    assert read_book(BOOK)[-1].sites == ("shop-7", "shop-8")


def test_a_worker_has_names_and_no_limits(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["token", "create", "--name", "laptop", "--role", "worker", "--node", "desk-?"]) == 0
    (entry,) = read_book(BOOK)
    assert (entry.role, entry.nodes) == ("worker", ("desk-?",))
    capsys.readouterr()
    assert run(["token", "list"]) == 0
    assert "desk-?" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "span"),
    [
        ("45s", timedelta(seconds=45)),
        ("90m", timedelta(minutes=90)),
        ("12h", timedelta(hours=12)),
        ("30d", timedelta(days=30)),
        ("2w", timedelta(days=14)),
    ],
)
def test_spans_of_time(text: str, span: timedelta) -> None:
    assert run([*ALICE, "--expires", text]) == 0
    (entry,) = read_book(BOOK)
    assert entry.expires is not None
    assert entry.created is not None
    assert entry.expires - entry.created == span


@pytest.mark.parametrize("text", ["30", "d", "0d", "-1d", "1.5h", "30 d", "1y", "1d2h", "٣d", "1d\n"])
def test_other_texts_are_no_spans(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*ALICE, f"--expires={text}"]) == 2
    assert "is not a span of time" in capsys.readouterr().err


def test_rotate_and_revoke(capsys: pytest.CaptureFixture[str]) -> None:
    run(ALICE)
    assert run(["token", "rotate", "alice", "--grace", "1h"]) == 0
    first, second = capsys.readouterr().out.split()
    old, new = read_book(BOOK)
    assert [old.sha256, new.sha256] == [digest_of(token.encode()).hex() for token in (first, second)]
    assert (old.expires is None, new.expires is None) == (False, True)
    assert run(["token", "revoke", old.id]) == 0
    assert "1 token revoked" in capsys.readouterr().err
    assert list(read_book(BOOK)) == [new]


def test_the_old_token_may_end_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    run(ALICE)
    first = capsys.readouterr().out.strip()
    assert run(["token", "rotate", "alice", "--grace", "0s", "--out", "new.token"]) == 0
    said = capsys.readouterr().err
    assert "new.token" in said
    assert "worthless" in said
    old = read_book(BOOK)[0]
    assert old.sha256 == digest_of(first.encode()).hex()
    assert old.expired(time.time())


def test_a_wrong_token_in_the_environment_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERRACE_TOKEN", "not a token")
    assert run(["jobs", "list"]) == 2
    err = capsys.readouterr().err
    assert "TERRACE_TOKEN holds no token: one line of 16 to 512" in err
    assert "not a token" not in err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["create", "--name", "../x", "--role", "user"], 2, "--name: must be 1 to 63 lower-case letters"),
        (["create", "--name", "pi", "--role", "user", "--node", "x"], 2, "--node is not for tokens of the role user"),
        (["create", "--name", "pi", "--role", "node", "--node", "A"], 2, "--node: String should match pattern"),
        (["create", "--name", "a", "--role", "worker", "--tier", "end"], 2, "--tier is not for tokens of the role"),
        (["create", "--name", "a", "--role", "admin", "--site", "x"], 2, "--site is not for tokens of the role admin"),
        (["create", "--name", "a", "--role", "user", "--site", "Shop 7"], 2, "--site: must be 1 to 63 lower-case"),
        (
            ["create", "--name", "a", "--role", "node", "--unfinished-jobs", "1"],
            2,
            "--unfinished-jobs is not for tokens",
        ),
        (["create", "--name", "a", "--role", "user", "--expires", "soon"], 2, "'soon' is not a span of time"),
        (["create", "--name", "a", "--role", "user", "--expires", "99999999999d"], 2, "is longer than 36600 days"),
        (["rotate", "alice", "--grace", "soon"], 2, "'soon' is not a span of time"),
        (["rotate", "alice", "--expires", "soon"], 2, "'soon' is not a span of time"),
        (["create", "--name", "alice", "--role", "user"], 1, "'alice' has a token: 'terrace token rotate alice'"),
        (["rotate", "bob"], 2, "'bob' has no token"),
        (["revoke", "bob"], 2, "no token has the name or id 'bob'"),
        (["list", "--tokens", "nowhere.toml"], 2, "cannot read the file of tokens nowhere.toml: No such file"),
    ],
)
def test_mistakes_are_one_sentence_and_change_nothing(
    arguments: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run(ALICE)
    before = BOOK.read_bytes()
    capsys.readouterr()
    assert run(["token", *arguments]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert err.count("\n") == 1
    assert BOOK.read_bytes() == before


def test_every_command_that_talks_to_a_scheduler_can_show_a_token() -> None:
    def leaves(name: str, command: Any) -> Iterator[tuple[str, set[str]]]:
        for child, inner in getattr(command, "commands", {}).items():
            yield from leaves(f"{name} {child}", inner)
        yield name, {option for parameter in command.params for option in parameter.opts}

    for name, (module, *_) in _COMMANDS.items():
        if not module.startswith("terrace.commands"):
            continue
        for path, flags in leaves(name, _load(name)):
            if "--scheduler" in flags:
                assert {"--token-file", "--tls-ca"} <= flags, path


def test_a_file_with_brackets_is_named_as_it_is(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    assert run([*ALICE, "--out", "[red]a]"]) == 0
    assert "it is in [red]a] and nowhere else" in capsys.readouterr().err
    assert (folder / "[red]a]").exists()
