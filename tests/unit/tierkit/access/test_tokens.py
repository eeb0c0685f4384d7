"""Tokens and the file of tokens."""

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tierkit.access import (
    TokenEntry,
    TokenFile,
    checked_token,
    digest_of,
    new_token,
    read_book,
    read_token,
    write_book,
)
from tierkit.errors import SetupError
from tierkit.types import Tier

SHA = "0123456789abcdef" * 4


def entry(token: str = "", **fields: object) -> TokenEntry:
    sha256 = digest_of(token.encode()).hex() if token else SHA
    return TokenEntry.model_validate({"name": "alice", "role": "user", "sha256": sha256, **fields})


def test_a_new_token_is_long_and_never_the_same() -> None:
    tokens = {new_token() for _ in range(100)}
    assert len(tokens) == 100
    assert all(len(token) == 51 and checked_token(token, "it") == token for token in tokens)


def book_of(folder: Path, *entries: TokenEntry) -> tuple[TokenEntry, ...]:
    path = folder / "tokens.toml"
    path.write_text(write_book(entries))
    path.chmod(0o600)
    return read_book(path)


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    entries = [
        entry("one", expires=datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC), requests_per_minute=7, unfinished_jobs=2),
        entry("two", upload_bytes_per_minute=1000, created=datetime(2026, 1, 2, tzinfo=UTC)),
        entry("three", name="pi", role="node", nodes=("pi", "door-*"), tiers=(Tier.END,), observations_per_minute=9),
        entry("four", name="laptop", role="worker", nodes=("laptop-*",)),
        entry("five", name="shop-7", role="node", sites=("shop-7",)),
        entry("six", name="olga", sites=("shop-7", "shop-8")),
    ]
    assert list(book_of(tmp_path, *entries)) == entries
    assert "one" not in write_book(entries)


@pytest.mark.parametrize(
    ("fields", "node_id", "allowed"),
    [
        ({}, "pi", True),
        ({}, "pi-end-1", True),
        ({}, "pi2", False),
        ({}, "other-pi", False),
        ({"nodes": ("*",)}, "whoever", True),
        ({"nodes": ("door-?",)}, "door-1", True),
        ({"nodes": ("door-?",)}, "door-10", False),
        ({"nodes": ("door-?",)}, "pi", False),
    ],
)
def test_the_node_ids_of_a_token(fields: dict[str, Any], node_id: str, allowed: bool) -> None:
    for role in ("node", "worker"):
        assert entry(name="pi", role=role, **fields).may_take(node_id) is allowed


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("token = ", "not valid TOML"),
        ("tokens = 1", "tokens is unknown; did you mean token"),
        ("token = 1", "token is 1: input should be a list"),
        ('[[token]]\nname = "a"\nrole = "user"', "token.0.sha256 is missing"),
        (
            f'[[token]]\nname = "A b"\nrole = "user"\nsha256 = "{SHA}"',
            "token.0.name is 'A b': must be 1 to 63 lower-case",
        ),
        (
            f'[[token]]\nname = "a"\nrole = "root"\nsha256 = "{SHA}"',
            "token.0.role is 'root': input should be 'user', 'operator', 'admin', 'node' or 'worker'",
        ),
        (
            '[[token]]\nname = "a"\nrole = "user"\nsha256 = "hello"',
            "token.0.sha256: string should match pattern",
        ),
        (
            f'[[token]]\nname = "a"\nrole = "user"\nsha256 = "{SHA}"\nexpires = 2030-01-01T00:00:00',
            "token.0.expires is .*: input should have timezone info",
        ),
        (
            f'[[token]]\nname = "a"\nrole = "user"\nsha256 = "{SHA}"\nrequests = 1',
            "token.0.requests is unknown; known are name, role",
        ),
        (
            f'[[token]]\nname = "a"\nrole = "user"\nsha256 = "{SHA}"\nrequests_per_minute = 0',
            "token.0.requests_per_minute is 0: input should be greater than 0",
        ),
        (
            f'[[token]]\nname = "a"\nrole = "user"\nsha256 = "{SHA}"\nnodes = ["*"]',
            "nodes is not for tokens of the role",
        ),
        (
            f'[[token]]\nname = "a"\nrole = "node"\nsha256 = "{SHA}"\nunfinished_jobs = 1',
            "unfinished_jobs is not for tokens of the role",
        ),
        (
            f'[[token]]\nname = "a"\nrole = "worker"\nsha256 = "{SHA}"\nrequests_per_minute = 1',
            "requests_per_minute is not for tokens of the role worker",
        ),
        (
            f'[[token]]\nname = "a"\nrole = "worker"\nsha256 = "{SHA}"\ntiers = ["end"]',
            "tiers is not for tokens of the role worker",
        ),
        *(
            (
                f'[[token]]\nname = "a"\nrole = "{role}"\nsha256 = "{SHA}"\nsites = ["shop-7"]',
                f"sites is not for tokens of the role {role}",
            )
            for role in ("operator", "admin", "worker")
        ),
        (
            f'[[token]]\nname = "a"\nrole = "user"\nsha256 = "{SHA}"\nsites = ["Shop 7"]',
            "token.0.sites.0 is 'Shop 7': must be 1 to 63 lower-case",
        ),
        (
            f'[[token]]\nname = "a"\nrole = "user"\nsha256 = "{SHA}"\nobservations_per_minute = 1',
            "observations_per_minute is not for tokens of the role user",
        ),
        (
            f'[[token]]\nname = "a"\nrole = "node"\nsha256 = "{SHA}"\nobservations_per_minute = 0',
            "token.0.observations_per_minute is 0: input should be greater than 0",
        ),
        (f'[[token]]\nname = "a"\nrole = "user"\nsha256 = "{SHA}"\n' * 2, "have the same sha256"),
        (
            f'[[token]]\nname = "a"\nrole = "user"\nsha256 = "{SHA}"\nuploads = 1{"0" * 400}',
            "token.0.uploads",
        ),
        (
            f'[[token]]\nname = "a"\nrole = "user"\nsha256 = "{SHA}"\n'
            f'[[token]]\nname = "a"\nrole = "node"\nsha256 = "{SHA[::-1]}"\n',
            "'a' has tokens of two roles",
        ),
        ("", "is empty"),
    ],
)
def test_wrong_files_are_refused_in_a_sentence(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(SetupError, match=f"the file of tokens {path}.*{message}"):
        read_book(path)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o666])
def test_files_that_others_may_use_are_refused(mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "token"
    path.write_text(new_token())
    path.chmod(mode)
    if os.geteuid() == 0:  # root's own may be read by their group
        os.chown(path, 1000, -1)
        monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(SetupError, match=rf"others may use the token file .* \(mode {mode:04o}\): chmod 0600"):
        read_token(path)
    with pytest.raises(SetupError, match="others may use the file of tokens"):
        read_book(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_files_of_other_users_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(new_token())
    path.chmod(0o600)
    os.chown(path, 12345, -1)
    with pytest.raises(SetupError, match=r"belongs to another user \(uid 12345\)"):
        read_token(path)


@pytest.mark.parametrize("text", ["", "short", "two words of secret text", "x" * 513, "s3cret-with-ümlaut-and-more"])
def test_what_is_no_token_is_refused_without_repeating_it(text: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(SetupError, match="holds no token") as caught:
        read_token(path)
    assert not text or text not in str(caught.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of root's")
@pytest.mark.parametrize("reader", [1000, 0])
@pytest.mark.parametrize(("mode", "refused"), [(0o440, False), (0o400, False), (0o460, True), (0o444, True)])
def test_root_may_hand_a_file_to_a_service_by_its_group_and_read_it_as_well(
    mode: int, refused: bool, reader: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "token"
    path.write_text(new_token())
    path.chmod(mode)
    monkeypatch.setattr("os.geteuid", lambda: reader)
    if refused:
        with pytest.raises(SetupError, match="others may use the token file"):
            read_token(path)
    else:
        assert read_token(path).startswith("terrace_")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"cannot read the token file .*nothing: No such file"):
        read_token(tmp_path / "nothing")


def test_a_file_without_end_is_refused() -> None:
    with pytest.raises(SetupError, match=r"others may use|is longer than"):
        read_token(Path("/dev/zero"))


@pytest.mark.parametrize("kind", [str, Path], ids=["str", "path"])
def test_the_file_of_a_token_is_named_by_text_or_path(tmp_path: Path, kind: type) -> None:
    path, token = tmp_path / "alice.token", new_token()
    path.touch(0o600)
    path.write_text(token)
    assert TokenFile(kind(path))() == token
    with pytest.raises(SetupError, match="absent"):
        TokenFile(kind(tmp_path / "absent"))
