"""Certificates made for the run, and services that have them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import trustme


@dataclass(frozen=True, kw_only=True)
class Certificates:
    """An authority, and certificates for this machine."""

    folder: Path
    authority: trustme.CA

    @property
    def ca(self) -> Path:
        """What clients trust."""
        return self.folder / "ca.pem"

    def issue(self, name: str, *hosts: str, valid_for: timedelta = timedelta(days=90)) -> dict[str, Path]:
        """Settings of a service with a certificate of its own, made anew; expired where `valid_for` is negative."""
        now = datetime.now(UTC)
        made = self.authority.issue_cert(
            *(hosts or ("127.0.0.1", "localhost", "::1")),
            not_before=now - timedelta(days=100),
            not_after=now + valid_for,
        )
        cert, key = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        for path, content in ((cert, made.cert_chain_pems[0].bytes()), (key, made.private_key_pem.bytes())):
            part = path.with_suffix(".part")
            part.write_bytes(content)
            os.chmod(part, 0o600)
            part.replace(path)
        return {"tls_cert": cert, "tls_key": key}


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    folder = tmp_path_factory.mktemp("certificates")
    authority = trustme.CA()
    made = Certificates(folder=folder, authority=authority)
    authority.cert_pem.write_to_path(str(made.ca))
    return made
