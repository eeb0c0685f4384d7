"""Emulated links and the requests that pass them: the file of the flag `--links`.

    seed = 7

    [[link]]
    name = "end-cloud"
    to = ["10.0.9.0/24"]        # addresses, networks or host names
    delay_s = 0.5               # one way
    bandwidth_bps = 20_000_000  # each way

Each `[[link]]` is one link, and all requests that pass it share its bandwidth. Requests to other addresses are not
changed.
"""

from __future__ import annotations

import re
from functools import cached_property
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    field_validator,
    model_validator,
)

from tierkit.documents import read_document

__all__ = ["DelayS", "EmulatedMs", "LinkSpec", "LinkTo", "Links", "read_links"]

_NAME = re.compile(r"(?![\d.]+$)[A-Za-z0-9._-]+")
"""Form of a host name. Numbers and dots only would be an address."""

_HOST = "address, network (10.0.9.0/24) or host name"

EmulatedMs = Annotated[float, Field(gt=0, le=3_600_000)]
"""Milliseconds that something is made to take, an hour at most."""

DelayS = Annotated[float, Field(ge=0.0, le=3600.0)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]


class LinkSpec(BaseModel):
    """Delay, bandwidth, jitter and loss of a path. The default is a perfect link."""

    # Strict: `delay_s = true` is no number of seconds.
    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True, strict=True
    )

    delay_s: DelayS = 0.0
    """Seconds from one side to the other, an hour at most; a question and its answer take twice that."""
    jitter_s: NonNegativeFloat = 0.0
    """Each way of each exchange differs from `delay_s` by up to this many seconds, uniformly; at most `delay_s`."""
    bandwidth_bps: Annotated[float, Field(ge=1.0)] | None = None
    """Bits per second, each way, 1 at least; None for no limit."""
    reset: Share = 0.0
    """Share of the exchanges whose connection breaks, half of them before the other side has the question, half in the
    middle of the answer."""
    stall: Share = 0.0
    """Share of the exchanges that stop without a word, at the same points: nothing arrives any more."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.jitter_s > self.delay_s:
            raise ValueError(f"jitter_s ({self.jitter_s:g}) must be at most delay_s ({self.delay_s:g})")
        if self.reset + self.stall > 1:
            raise ValueError(f"reset and stall add up to {self.reset + self.stall:g}; at most 1 of all can be lost")
        return self


class LinkTo(LinkSpec):
    """A link and where it leads."""

    name: str
    """Name in the log, and part of the seed: links of different names draw different random numbers."""
    to: Annotated[tuple[str, ...], Field(min_length=1, strict=False)]
    """Addresses, networks (10.0.9.0/24) or host names that requests over this link go to; a single one needs no
    list.
    """

    @field_validator("to", mode="before")
    @classmethod
    def _hosts(cls, value: Any) -> Any:
        if not isinstance(value, str | list | tuple):
            raise ValueError(f"expected is an {_HOST}, or a list of them")
        hosts = [value] if isinstance(value, str) else value
        for host in hosts:
            if not isinstance(host, str) or (_network(host) is None and not _NAME.fullmatch(host)):
                raise ValueError(f"{host!r} is not an {_HOST}")
        return hosts

    @cached_property
    def _networks(self) -> tuple[IPv4Network | IPv6Network, ...]:
        return tuple(network for text in self.to if (network := _network(text)) is not None)

    def leads_to(self, host: str) -> bool:
        """True if requests to `host`, as written in their URL, pass this link."""
        if host in self.to:
            return True
        try:
            address = ip_address(host)
        except ValueError:
            return False
        return any(address in network for network in self._networks)


class Links(BaseModel):
    """All links of one service."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seed: NonNegativeInt = 0
    """Seed of jitter and loss: the n-th exchange over a link has the same fate in every run."""
    link: Annotated[tuple[LinkTo, ...], Field(min_length=1)]
    """Links, of which the first one that leads to a host is used."""

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        names = [link.name for link in self.link]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"several links are called {', '.join(twice)}")
        return self


def read_links(path: Path) -> Links:
    """The links of a file.

    Raises:
        SetupError: it cannot be read, or says something that is unknown or does not fit.
    """
    return read_document(path, Links, what="links file")


def _network(text: str) -> IPv4Network | IPv6Network | None:
    try:
        return ip_network(text, strict=False)
    except ValueError:
        return None  # a host name
