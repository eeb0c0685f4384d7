"""Profiles: the speed and number of the machines of an experiment, and the links between them. They are data, not code.

    [nodes]
    end = 8

    [compute_ms_per_image]      # emulated; a tier that is not named runs at its real speed
    end = 7.41

    [path.end-edge]             # <who asks>-<who answers>; fields of `PathSpec`
    delay_s = 0.25

The address identifies the node that answers. Every node of an experiment listens on a separate loopback address,
`127.0.<tier>.<number>` (`address_of`). So the links of a service can be chosen by network, like on real machines.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    ValidationError,
    field_validator,
)

from experiments.emulation.links import DelayS, EmulatedMs, LinkSpec
from tierkit.documents import faults, read_document
from tierkit.errors import InvalidInput
from tierkit.types import Tier

__all__ = [
    "MAX_NODES",
    "Counts",
    "NodeNumbers",
    "PathSpec",
    "Profile",
    "Speeds",
    "address_of",
    "profile_names",
    "read_profile",
    "recorded_profile",
    "write_links",
]

_FOLDER = Path(__file__).parent / "profiles"

_PATHS = ("scheduler-end", "end-edge", "end-cloud", "edge-cloud")
"""Paths of inference: the tier that asks, and the tier that answers. Heartbeats take no emulated link, because their
latency does not matter in any experiment.
"""

_THIRD_BYTE = {Tier.END: 1, Tier.EDGE: 2, Tier.CLOUD: 3}

MAX_NODES = 254
"""Most nodes of a tier: one byte of an address tells them apart."""


_NUMBERS = re.compile(r"([0-9]{1,99})(?:-([0-9]{1,99}))?")
"""Most digits of a number: too many for a fleet, but not for an error message."""


def _read_numbers(value: Any) -> Any:
    """ "0,2-4" as numbers of nodes: 0, 2, 3, 4. What they may be is up to the experiment."""
    if not isinstance(value, str):
        return value
    numbers: set[int] = set()
    for part in value.split(","):
        found = _NUMBERS.fullmatch(part.strip())
        if found is None:
            raise InvalidInput(f"{value!r} is not a list of numbers: write it like 0,1,6 or 1-8")
        first, last = int(found[1]), int(found[2] or found[1])
        if last < first:
            raise InvalidInput(
                f"{part.strip()!r} is not a range: its first number must be the smaller one, as in {last}-{first}"
            )
        if last > MAX_NODES:
            raise InvalidInput(f"{part.strip()!r}: a fleet has at most {MAX_NODES} end devices")
        numbers.update(range(first, last + 1))
    return sorted(numbers)


NodeNumbers = Annotated[tuple[int, ...], BeforeValidator(_read_numbers)]
"""Numbers of nodes, given as numbers or as a text such as "0,2-4"."""


class _Part(BaseModel):
    # Strict: `edge = true` is no number of nodes.
    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True, strict=True
    )


class PathSpec(LinkSpec):
    """A path between tiers. Who names one says how long it is; what else a link has is perfect unless it is said."""

    delay_s: DelayS
    """Seconds one way, half of what a question and its answer take; 0 for none."""


class Counts(_Part):
    """Nodes of each tier."""

    end: Annotated[int, Field(ge=1, le=MAX_NODES)]
    """Number of end devices, 1 to 254."""
    edge: Annotated[int, Field(ge=0, le=MAX_NODES)]
    """Number of edge nodes, 0 to 254."""
    cloud: Annotated[int, Field(ge=0, le=MAX_NODES)]
    """Number of cloud nodes, 0 to 254."""

    def of(self, tier: Tier) -> int:
        return {Tier.END: self.end, Tier.EDGE: self.edge, Tier.CLOUD: self.cloud}[tier]


class Speeds(_Part):
    """Emulated milliseconds per image of each tier, an hour at most; None for the real speed."""

    end: EmulatedMs | None = None
    edge: EmulatedMs | None = None
    cloud: EmulatedMs | None = None

    def of(self, tier: Tier) -> float | None:
        return {Tier.END: self.end, Tier.EDGE: self.edge, Tier.CLOUD: self.cloud}[tier]


class Profile(_Part):
    """The machines of an experiment and the links between them."""

    title: str
    """Description of the machines and links in one line."""
    source: str
    """Source of the figures."""
    seed: NonNegativeInt = 0
    """Seed of the links' jitter and loss."""
    nodes: Counts
    """A table with the numbers of nodes: end, edge and cloud."""
    compute_ms_per_image: Speeds = Speeds()
    path: Mapping[str, PathSpec] = {}
    """Links by the name of the path. Paths without an entry are not emulated."""

    def with_nodes(self, **counts: int) -> Profile:
        """Return the profile with other numbers of machines: `with_nodes(end=3, edge=0)`."""
        return self.model_copy(update={"nodes": self.nodes.model_copy(update=counts)})

    def __str__(self) -> str:
        nodes = ", ".join(f"{self.nodes.of(tier)} {tier}" for tier in Tier)
        links = "; ".join(f"{name} {_link_in_words(spec)}" for name, spec in self.path.items())
        return f"{self.title}: {nodes}; " + (f"links, one way: {links}" if links else "no links")

    @property
    def limits(self) -> str:
        """Describe the paths with a bandwidth in words; "" if none has one."""
        return ", ".join(f"{name} {_mbps_in_words(spec)}" for name, spec in self.path.items() if spec.bandwidth_bps)

    def round_trip_s(self, path: str) -> float:
        """Latency of a path, there and back: what the paper calls t^c."""
        spec = self.path.get(path)
        return 0.0 if spec is None else 2 * spec.delay_s

    @field_validator("path")
    @classmethod
    def _known_paths(cls, value: Mapping[str, PathSpec]) -> Mapping[str, PathSpec]:
        for name in value:
            if name not in _PATHS:
                close = difflib.get_close_matches(name, _PATHS, n=1)
                hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(_PATHS)}"
                raise ValueError(f"there is no path {name}; {hint}")
        return value


def _link_in_words(spec: LinkSpec) -> str:
    words = [f"{spec.delay_s:g} s"]
    if spec.jitter_s:
        words[0] += f" +- {spec.jitter_s:g} s"
    if spec.bandwidth_bps:
        words.append(_mbps_in_words(spec))
    words += [f"{share:.3g} of all {what}" for share, what in ((spec.reset, "reset"), (spec.stall, "stalled")) if share]
    return ", ".join(words)


def _mbps_in_words(spec: LinkSpec) -> str:
    return f"{(spec.bandwidth_bps or 0.0) / 1e6:g} Mbit/s"


def profile_names() -> list[str]:
    """Profiles that ship with Terrace."""
    return sorted(path.stem for path in _FOLDER.glob("*.toml"))


def read_profile(name: str) -> Profile:
    """Read a profile by its name, or by the path of a TOML file.

    Raises:
        InvalidInput: there is no such profile.
        SetupError: the file cannot be read, or has an unknown field or a value that does not fit.
    """
    if name.endswith(".toml"):
        return read_document(Path(name), Profile, what="profile")
    known = profile_names()
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
        raise InvalidInput(f"there is no profile {name!r}; {hint} (a file of your own ends in .toml)")
    return read_document(_FOLDER / f"{name}.toml", Profile, what="profile")


def recorded_profile(value: Mapping[str, Any]) -> Profile:
    """The profile that a record holds, without the name by which it was called.

    Raises:
        ValueError: it is not a profile; the message says why.
    """
    try:
        return Profile.model_validate({name: part for name, part in value.items() if name != "name"})
    except ValidationError as exc:
        raise ValueError(f"config.profile: {faults(exc, Profile)}") from exc


def address_of(tier: Tier, number: int) -> str:
    """Address of the `number`-th node of a tier, from 1: a loopback address (Linux has all of 127.0.0.0/8)."""
    return f"127.0.{_THIRD_BYTE[tier]}.{number}"


def write_links(profile: Profile, asks: str, path: Path, *, number: int = 0) -> bool:
    """Write the file for the setting `links` of a service that asks, "scheduler" or a tier.

    Each end device has a separate link from the scheduler. All that an end device sends up shares one link per tier.

    Args:
        number: number of the service within its tier; each draws other random numbers.

    Returns:
        True if there is a link; otherwise nothing is written.
    """
    links = list(_links(profile, asks))
    if links:
        path.write_text("\n".join([f"seed = {profile.seed + number}", *links]), encoding="utf-8")
    return bool(links)


def _links(profile: Profile, asks: str) -> Iterator[str]:
    for name, spec in profile.path.items():
        who, _, answers = name.partition("-")
        if who != asks:
            continue
        tier = Tier(answers)
        if tier is Tier.END:
            for number in range(1, profile.nodes.of(tier) + 1):
                yield _table(f"{name}-{number}", address_of(tier, number), spec)
        else:
            yield _table(name, f"127.0.{_THIRD_BYTE[tier]}.0/24", spec)


def _table(name: str, to: str, spec: LinkSpec) -> str:
    fields = {"name": name, "to": [to], **spec.model_dump(exclude_defaults=True)}
    # Strings, lists of strings and finite numbers are written alike in JSON and TOML.
    return "\n".join(["", "[[link]]", *(f"{key} = {json.dumps(value)}" for key, value in fields.items())])
