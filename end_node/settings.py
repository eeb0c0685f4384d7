"""Settings of an end node."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from datetime import time
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)
from pydantic_core import from_json

from models.kept.page import KEPT_PICTURES
from tierkit.access import Role
from tierkit.extensions import name_in
from tierkit.settings import CommaSeparatedUrls, NodeSettings, Port, UserPath
from tierkit.wire.messages import MAX_ALLOWED_UPSTREAMS, NODE_ID_PATTERN, UpperTier

__all__ = [
    "SOURCES",
    "EndSettings",
    "LearnSettings",
    "SourceSettings",
    "SpoolSettings",
    "UplinkSettings",
    "check_url",
    "scheme_of",
]

SOURCES = "terrace.sources"
"""Group of the entry points of sources."""

Which = Literal["none", "unsure", "all"]

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def _read_bytes(value: object) -> object:
    if not isinstance(value, str):
        return value
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", value)
    if found is None or found[2].lower() not in _UNITS:
        raise ValueError("must be a number of bytes with a unit, such as 500MB or 2GiB")
    return int(float(found[1]) * _UNITS[found[2].lower()])


def _read_hours(value: object) -> object:
    if value is None or isinstance(value, tuple | list):
        return value
    found = re.fullmatch(r"\s*(\d\d):(\d\d)\s*-\s*(\d\d):(\d\d)\s*", str(value))
    try:
        if found is None:
            raise ValueError
        first, last = time(int(found[1]), int(found[2])), time(int(found[3]), int(found[4]))
    except ValueError:
        raise ValueError("must be two times of day, such as 22:00-06:00") from None
    if first == last:
        raise ValueError("must not begin and end at the same time: leave it out for the whole day")
    return first, last


Bytes = Annotated[PositiveInt, BeforeValidator(_read_bytes)]
"""A number of bytes, or a text such as "500MB"."""

Hours = Annotated[tuple[time, time], BeforeValidator(_read_hours)]
"""The first moment of a daily period, and the first one after it."""


def _read_sources(value: object) -> object:
    """Sources from NAME=URL, as flags have them (a list) and the environment (separated by spaces)."""
    if isinstance(value, str):
        value = value.split()
    if isinstance(value, dict):
        raise ValueError("must be a list of tables: write [[source]] with two brackets")
    if not isinstance(value, list | tuple):
        return value
    return [_source_of(each) if isinstance(each, str) else each for each in value]


def _source_of(text: str) -> dict[str, str]:
    name, equals, url = text.partition("=")
    if not (name and equals and url):
        raise ValueError("must be NAME=URL, such as gate=rtsp://10.0.0.9/main, or NAME=push")
    return {"name": name, "kind": "push"} if url == "push" else {"name": name, "url": url}


def _read_json(value: object) -> object:
    """A table, from the JSON text of an environment variable."""
    return from_json(value) if isinstance(value, str) else value


class _Table(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )


_SCHEMES: dict[str, tuple[str, ...]] = {
    "stream": ("rtsp", "rtsps", "http", "https", ""),
    "camera": ("",),
    "folder": ("",),
    "snapshot": ("http", "https"),
}
"""Schemes of URLs by the kind of source; "" for a path. A kind of another package checks its URL itself."""


def scheme_of(url: str) -> str:
    """The scheme of a URL, in lower case; "" for a path."""
    scheme, found, _ = url.partition("://")
    return scheme.lower() if found else ""


def check_url(kind: str, url: str) -> None:
    """Raise ValueError if a source of this kind cannot have this URL."""
    if kind not in _SCHEMES:
        return
    scheme, allowed = scheme_of(url), _SCHEMES[kind]
    if scheme not in allowed:
        named = [f"{each}://" if each else "a path" for each in allowed]
        raise ValueError(
            f"the url of a {kind} is {' or '.join(named)}, not {scheme[:32] + '://' if scheme else 'a path'}"
        )


def _printable(value: str) -> str:
    if not value.isprintable():
        raise ValueError("must have no control characters")
    return value


class SourceSettings(_Table):
    """A place where pictures come from."""

    name: Annotated[str, Field(pattern=NODE_ID_PATTERN)]
    """Name of the source, unique on the node: lower-case letters, digits, dots, dashes and underscores."""

    kind: Annotated[str, AfterValidator(name_in(SOURCES))] | None = None
    """`stream` (RTSP, HTTP or a video file), `camera` (V4L2), `folder`, `snapshot` (a URL to poll), `push` (programs
    post pictures to the node) or a kind of another package. Default: what `url` names."""

    url: Annotated[str, AfterValidator(_printable)] = Field(default="", repr=False, max_length=2000)
    """URL, folder, file or device of the source. A `push` source has none."""

    rate: Annotated[PositiveFloat, Field(le=1000)] | None = None
    """Largest number of pictures per second; of a stream, the latest picture wins. Default: 1 for streams, cameras
    and snapshots, no limit for folders and `push`."""

    changed: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Skip a picture of a stream, camera or snapshot that differs by less than this from the last one taken: the mean
    difference of brightness, as a share of the whole range."""

    keep: Which = "none"
    """Pictures to keep on the device once they are answered, as long as the spool has room: none, unsure or all."""

    learn: bool = False
    """Keep pictures of this source for learning. The table [learn] and the scheduler setting `--learn` must allow it
    too."""

    after: Literal["leave", "move", "delete"] = "leave"
    """Action for a file of a folder after its answer is stored: leave, move or delete it."""

    move_to: UserPath | None = None
    """Folder for the files with `after = "move"`, on the same disk."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.kind == "push" and self.url:
            raise ValueError("a push source has no url")
        if self.kind != "push" and not self.url:
            raise ValueError("url is missing")
        if (self.after == "move") != (self.move_to is not None):
            raise ValueError('after = "move" and move_to go together')
        if self.kind is None:
            check_url("stream", self.url)  # a stream allows whatever a source may have
        else:
            self.check_kind(self.kind)
        if self.move_to is not None:
            folder, target = Path(self.url).expanduser().absolute(), self.move_to.absolute()
            if folder.is_relative_to(target):
                raise ValueError("move_to must be neither the folder of the files nor above it")
        return self

    def check_kind(self, kind: str) -> None:
        """Raises ValueError if the settings do not fit a kind."""
        check_url(kind, self.url)
        if self.after != "leave" and kind != "folder":
            raise ValueError("after is for folders")
        if self.changed and kind in ("folder", "push"):
            raise ValueError("changed is for streams, cameras and snapshots")


class UplinkSettings(_Table):
    """Limits on what leaves the device, and when."""

    escalate: Literal["nothing", "unsure", "all"] = "unsure"
    """Pictures that go to upstream nodes for a better answer: nothing, unsure (by the thresholds of the route) or
    all."""

    pictures_to_scheduler: Which = "none"
    """Pictures of which the scheduler gets a copy: none, unsure or all."""

    bytes_per_day: Bytes | None = None
    """Budget for all that the node sends and receives in 24 hours, except networks from the scheduler and the traffic
    of its sources. A node with a budget takes no jobs. Default: no limit."""

    hours: Hours | None = None
    """Time of day in which pictures may leave, in the time zone of the device, such as 22:00-06:00. Answers leave at
    any time. Default: the whole day."""


class SpoolSettings(_Table):
    """Storage for what waits on the device."""

    size: Annotated[Bytes, Field(ge=4 * 2**20)] = 500 * 10**6
    """Largest number of bytes on the disk. Beyond it, the node drops first pictures with sure answers, then pictures
    with unsure answers, and answers last."""

    folder: UserPath | None = None
    """Folder of the spool. Default: the one in $STATE_DIRECTORY, which systemd sets, or
    ~/.local/share/terrace/NODE_ID."""


class LearnSettings(_Table):
    """The pictures that the device keeps to learn from."""

    size: Annotated[Bytes, Field(ge=2**20)]
    """Largest number of bytes on the disk, such as 500MB. Beyond it, the node drops pictures of the most frequent
    classes and kinds first, and labelled pictures last."""

    audit_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the pictures with sure answers that go up as well, to measure how often the tiers agree. Only pictures
    that may be kept count. They use the byte budget like every picture."""

    personal: bool = False
    """Answer the pictures of the node's sources with the personal head that `terrace train work --personal` has trained
    on the kept pictures. Jobs and requests get the network of their release."""

    pictures_to: tuple[UpperTier, ...] = ()
    """Tiers whose nodes may fetch kept pictures and learn from them for this device, such as ["edge"]. A node gets only
    pictures that went to it as pixels before. Default: none."""


class EndSettings(NodeSettings):
    """Serve an end node: the coarse answer at once, and the fine one from the upstream nodes that a task names."""

    service: ClassVar[str] = "end"
    tables: ClassVar[tuple[str, ...]] = ("source", "uplink", "spool", "learn")
    callers_at: ClassVar[Mapping[str, tuple[Role, ...]]] = {KEPT_PICTURES: ("node",)}

    port: Port = 8071

    task_budget_s: PositiveFloat = 30.0
    """Seconds that a task may take in all if its sender sets no budget."""

    allowed_upstreams: Annotated[CommaSeparatedUrls, Field(max_length=MAX_ALLOWED_UPSTREAMS)] = ()
    """URLs of upstream nodes to which this node may send images, comma-separated, such as http://10.0.0.5:8072; URLs
    below them count too. The scheduler gets the list and respects it. Default: any node that the scheduler names."""

    source: Annotated[tuple[SourceSettings, ...], BeforeValidator(_read_sources), Field(max_length=64)] = ()
    """Places where pictures come from, as NAME=URL; in the TOML file a table named `source` for each. The flag
    may be repeated, and the environment variable separates them by spaces."""

    uplink: Annotated[UplinkSettings, BeforeValidator(_read_json)] = UplinkSettings()
    """Limits on what leaves the device, and when: the table [uplink] of the TOML file. The environment variable is
    JSON."""

    spool: Annotated[SpoolSettings, BeforeValidator(_read_json)] = SpoolSettings()
    """Storage for pictures and answers that wait: the table [spool] of the TOML file. The environment variable is
    JSON."""

    learn: Annotated[LearnSettings | None, BeforeValidator(_read_json)] = None
    """The kept sample: the table [learn] of the TOML file. The environment variable is JSON. Default: nothing is
    kept."""

    remote_sources: bool = False
    """Let operators add, remove and pause sources through the scheduler. A source is a way into the network and the
    folders of the device."""

    @field_validator("source")
    @classmethod
    def _different_names(cls, value: tuple[SourceSettings, ...]) -> tuple[SourceSettings, ...]:
        names = [source.name for source in value]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"must have different names, and {twice!r} stands there twice")
        return value

    @model_validator(mode="after")
    def _no_budget_for_kept_pictures(self) -> Self:
        if self.learn is not None and self.learn.pictures_to and self.uplink.bytes_per_day is not None:
            raise ValueError("pictures_to in [learn] cannot be used with bytes_per_day in [uplink]: leave out one")
        return self

    @property
    def has_sources(self) -> bool:
        """True if the node has sources, or may get some."""
        return bool(self.source) or self.remote_sources

    @property
    def kept_folder(self) -> Path:
        """Folder of the kept sample."""
        return self.spool_folder / "kept"

    @property
    def spool_folder(self) -> Path:
        """Folder of the spool, the default filled in."""
        if self.spool.folder is not None:
            return self.spool.folder
        state = os.environ.get("STATE_DIRECTORY")
        return Path(state) / "spool" if state else Path("~/.local/share/terrace").expanduser() / self.node_id
