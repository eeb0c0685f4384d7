"""Findings of `terrace doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Check", "CheckVerdict", "short_digest"]


class CheckVerdict(StrEnum):
    """Verdict of a check; only `FAIL` makes the exit code of `terrace doctor` 1."""

    OK = "ok"
    NOTE = "note"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Check:
    """One finding."""

    group: str
    name: str
    verdict: CheckVerdict
    detail: str
    advice: str = ""
    """Advice to the user; empty if there is nothing to do."""


def short_digest(sha256: str | None) -> str:
    """Return the beginning of a sha256; "none" without one."""
    return "none" if sha256 is None else f"sha256 {sha256[:12]}…"
