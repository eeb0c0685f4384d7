"""Settings of every service: what can be set, and where a value comes from.

Order: flag, then environment, then TOML file, then default. The string under a field is its documentation: the text
that `--help` prints and that `docs/reference/settings.md` repeats. Plain construction (`EndSettings(port=0)`) reads
neither environment nor files; only `load_settings`, which `__main__` calls, does.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import re
import secrets
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from tierkit.access import Proxies, Role, TokenFile, check_private, checked_token
from tierkit.documents import read_toml, sentence
from tierkit.errors import SetupError
from tierkit.wire.messages import SiteName, checked_node_id, checked_url

__all__ = [
    "CommaSeparated",
    "CommaSeparatedUrls",
    "FurtherScheduler",
    "HttpUrl",
    "NodeSettings",
    "Port",
    "ScheduledBy",
    "ServiceSettings",
    "UserPath",
    "description",
    "lasting_name",
    "load_settings",
    "split_commas",
    "table_fields",
]


def split_commas(value: object) -> object:
    """The parts of a comma-separated text; anything else as it is."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


CommaSeparated = Annotated[tuple[str, ...], BeforeValidator(split_commas)]
"""Names: a list in TOML, "a,b" in a flag or an environment variable."""

HttpUrl = Annotated[str, AfterValidator(checked_url)]
"""An http or https URL, without the slash at its end."""

CommaSeparatedUrls = Annotated[tuple[HttpUrl, ...], BeforeValidator(split_commas)]
"""URLs: a list in TOML, "a,b" in a flag or an environment variable."""

UserPath = Annotated[Path, AfterValidator(Path.expanduser)]
"""A path in which ~ stands for the home directory."""

Port = Annotated[int, Field(ge=0, le=65535)]


class ServiceSettings(BaseModel):
    """Settings of all four services. Frozen; unknown names are refused."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )

    callers: ClassVar[tuple[Role, ...]] = ("user", "node")
    """Roles of tokens that have any business with this service."""

    callers_at: ClassVar[Mapping[str, tuple[Role, ...]]] = {}
    """Further roles that have business with a single path."""

    service: ClassVar[str] = "service"
    """Names the service in the prefix of its environment variables (TERRACE_END_...) and in the TOML file ([end])."""

    tables: ClassVar[tuple[str, ...]] = ()
    """Fields that have a table for themselves in the TOML file ([uplink]), or several ([[source]])."""

    host: str = "127.0.0.1"
    """Address to listen on. Default: only this machine; 0.0.0.0 serves every interface."""

    port: Port = 0
    """TCP port to listen on; 0 lets the system choose a free one, which the ready file and the log then name."""

    tokens: UserPath | None = None
    """File of the callers that may use this service, written by `terrace token`; read again when it changes.
    Default: none; everyone who reaches the service may then use it."""

    insecure: bool = False
    """Listen beyond loopback without tokens."""

    tls_cert: UserPath | None = None
    """PEM file with the certificate of this service, followed by its authorities' certificates; the service then speaks
    only https. Read again when it changes."""

    tls_key: UserPath | None = None
    """PEM file with the private key of `tls_cert`, without a password. Default: `tls_cert` contains it too."""

    tls_ca: UserPath | None = None
    """PEM file with the authorities whose certificates this service trusts. Default: the usual public ones."""

    log_level: Annotated[Literal["debug", "info", "warning", "error"], BeforeValidator(_lower)] = "info"
    """Least severe level of messages in the log: debug (with one line per request), info, warning or error."""

    log_format: Literal["text", "json"] = "text"
    """`text` for people, `json` for machines (one object a line), both on standard error."""

    drain_s: NonNegativeFloat = 10.0
    """Seconds that work under way may take to finish after SIGTERM or Ctrl-C; new work is refused meanwhile."""

    ready_file: UserPath | None = None
    """File to write once the service is ready ({"url", "pid", "node_id"} as JSON), removed when it stops."""

    max_body_bytes: PositiveInt = 64 * 1024 * 1024
    """Largest request body in bytes; a larger one is refused with 413."""

    header_timeout_s: PositiveFloat = 10.0
    """Seconds within which the head of a request must be complete; a slower connection is closed."""

    body_timeout_s: PositiveFloat = 30.0
    """Seconds within which a request body must arrive, plus the time that its bytes take at `min_upload_bps`."""

    min_upload_bps: PositiveInt = 64_000
    """Slowest accepted upload in bits per second, once `body_timeout_s` is spent."""

    write_timeout_s: PositiveFloat = 60.0
    """Seconds for which a client may leave an answer unread before its connection is cut."""

    keep_alive_s: PositiveInt = 75
    """Seconds for which an idle connection stays open for the next request."""

    max_connections: PositiveInt = 512
    """Largest number of connections. Requests on the next 64 connections get 503; further connections are closed at
    once."""

    @property
    def proxies(self) -> Proxies | None:
        """Reverse proxies in front of the service; None if it is asked directly."""
        return None


class FurtherScheduler(BaseModel):
    """One more scheduler that a node serves: a table `[[also]]` of the TOML file."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    scheduler: Annotated[CommaSeparatedUrls, Field(min_length=1)]
    """URL of the scheduler; with standbys, the URLs of all schedulers, comma-separated."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._:\[\]-]{0,61}[A-Za-z0-9\]])?$")] | None = None
    """Name of the scheduler in the logs and metrics of this node. Default: host and port of its first URL."""

    token_file: UserPath | None = None
    """File with this node's token for that scheduler; only its owner may read it. Default: the node's own token."""

    @property
    def label(self) -> str:
        """The name, the default filled in."""
        return self.name or _place_of(self.scheduler[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledBy:
    """A scheduler that a node registers with."""

    name: str
    urls: tuple[str, ...]
    """The URLs of the scheduler and its standbys."""
    token: Callable[[], str | None]
    """Gives the node's token for it; None without one."""


def _place_of(url: str) -> str:
    parts = urlsplit(url)
    return parts.netloc.rpartition("@")[2] or url


def _read_further(value: object) -> object:
    """Schedulers from texts: a flag may be repeated, and each text may hold several with spaces between them."""
    if isinstance(value, str):
        value = value.split()
    if isinstance(value, dict):
        raise ValueError("must be a list of tables: write [[also]] with two brackets")
    if not isinstance(value, list | tuple):
        return value
    found: list[object] = []
    for each in value:
        found += map(_further_of, each.split()) if isinstance(each, str) else [each]
    return found


def _further_of(text: str) -> dict[str, str]:
    name, equals, urls = text.partition("=")
    return {"name": name, "scheduler": urls} if equals and "/" not in name else {"scheduler": text}


class NodeSettings(ServiceSettings):
    """Further settings of end, edge and cloud nodes."""

    callers: ClassVar[tuple[Role, ...]] = ("user", "fleet")

    service: ClassVar[str] = "node"
    takes_all_cores: ClassVar[bool] = False
    """True if a batch may use all cores unless `threads` says otherwise."""

    node_id: str = ""
    """Name of this node in the device list: lower-case letters, digits, dots, dashes and underscores. Default: the
    machine's name, the tier, the port and four hex digits of the machine's identity, such as pi-end-8071-3fa9, the same
    at each start; with port 0, such as end-3fa9, fresh at each start."""

    scheduler: Annotated[CommaSeparatedUrls, Field(min_length=1)] | None = None
    """URL of the scheduler to register with and to fetch missing models from; without it, the node works without a
    fleet. If there are standbys, give the URLs of all schedulers, comma-separated."""

    token_file: UserPath | None = None
    """File with this node's token for the scheduler; only its owner may read it. With a token the node answers only
    callers that the scheduler sends, and the holders of `tokens`."""

    token: SecretStr | None = None
    """The token itself, if you cannot use a file. It has no flag, because command lines are public."""

    site: SiteName | None = None
    """The place to which this node belongs, such as shop-7: its pictures stay there unless the scheduler's `share` says
    otherwise. Default: the site of its token if the token has exactly one, otherwise no site."""

    advertise_url: HttpUrl | None = None
    """URL at which the scheduler and other nodes reach this node. Default: the address that it listens on; if that
    is every interface, the address of the interface that leads to the scheduler."""

    model: CommaSeparated = ()
    """Names of the networks to serve, comma-separated. Default: the network of this tier; if there are several, the
    best that this machine can run."""

    models: UserPath | None = None
    """Model set: a folder with manifest, networks and thresholds. Default: the scheduler's model set, which the node
    fetches; without a scheduler, the networks that ship with Terrace."""

    cache: UserPath = Path("~/.cache/terrace")
    """Folder that keeps weights fetched from the scheduler, and copies of its manifests for a start without it."""

    provider: Literal["cpu", "cuda"] = "cpu"
    """Execution provider of ONNX Runtime; `cuda` needs the extra `gpu` and a device."""

    threads: PositiveInt | None = None
    """Cores that one batch may use at a time. Default: one on an end device, which has other things to do; on an
    edge or cloud node, all cores that the process may use."""

    max_batch_size: PositiveInt = 64
    """Largest number of images in one inference per core that it uses. Waiting requests are joined up to this
    size. On a CPU core, more than 64 gain nothing, and more than 200 are slower, because activations leave the
    cache. Use more on a GPU."""

    max_queue_delay_ms: Annotated[float, Field(ge=0, le=10_000)] = 0.0
    """Milliseconds for which a request may wait for others to share its batch, at most 10000, or less if its time
    budget is short. 0 joins only requests that already wait."""

    max_queue_images: PositiveInt = 4096
    """Largest number of images that may wait for inference; further requests are refused with 503 at once."""

    images_per_minute: PositiveInt | None = None
    """Power budget: the scheduler gives this node no more images a minute than this. Default: no limit."""

    @field_validator("node_id", mode="after")
    @classmethod
    def _name_the_node(cls, value: str, info: ValidationInfo) -> str:
        if value:
            return checked_node_id(value)
        # The port that takes the place of 0 is known when the node listens, and its name before that.
        port = info.data.get("port")
        return lasting_name(cls.service, port) if port else f"{cls.service}-{secrets.token_hex(2)}"

    def own_token(self) -> Callable[[], str | None]:
        """Gives the token that this node shows to the scheduler; None if it has none. A file is read again when it
        has changed.

        Raises:
            SetupError: the file cannot be used.
        """
        if self.token_file is not None:
            return TokenFile(self.token_file)
        token = None if self.token is None else checked_token(self.token.get_secret_value(), "the setting token")
        return lambda: token

    @property
    def schedulers(self) -> tuple[ScheduledBy, ...]:
        """The schedulers that the node registers with. The first one gives it its model set."""
        if self.scheduler is None:
            return ()
        return (ScheduledBy(name=_place_of(self.scheduler[0]), urls=self.scheduler, token=self.own_token()),)

    @property
    def cores(self) -> int:
        """Cores for one batch, the default filled in."""
        return self.threads or (len(os.sched_getaffinity(0)) if self.takes_all_cores else 1)

    @property
    def batch_images(self) -> int:
        """Most images in one inference."""
        return self.max_batch_size * (self.cores if self.provider == "cpu" else 1)

    @property
    def max_queue_delay_s(self) -> float:
        return self.max_queue_delay_ms / 1000.0


class UpperSettings(NodeSettings):
    """Further settings of edge and cloud nodes."""

    takes_all_cores: ClassVar[bool] = True
    tables: ClassVar[tuple[str, ...]] = ("also",)

    only_features: bool = False
    """Serve only the tails of encoders, which take features and no pixels. Meant for a node that the scheduler does not
    trust: it then needs no whole network in its memory."""

    also: Annotated[tuple[FurtherScheduler, ...], BeforeValidator(_read_further), Field(max_length=255)] = ()
    """Further schedulers that this node serves, as URL or NAME=URL; in the TOML file, a table named `also` for each.
    Each scheduler that has work gets an equal share of the node. The flag may be repeated, and the environment
    variable separates them by spaces."""

    @model_validator(mode="after")
    def _schedulers_differ(self) -> Self:
        if not self.also:
            return self
        if self.scheduler is None:
            raise ValueError("the setting also (--also) needs the setting scheduler, which names the first one")
        places = [*self.scheduler, *(url for each in self.also for url in each.scheduler)]
        names = ["others", _place_of(self.scheduler[0]), *(each.label for each in self.also)]
        for what, found in (("URLs", places), ("names", names)):
            if twice := next((each for each in found if found.count(each) > 1), None):
                raise ValueError(f"the schedulers of a node must have different {what}, and {twice} occurs twice")
        return self

    @property
    def schedulers(self) -> tuple[ScheduledBy, ...]:
        """The schedulers that the node registers with. The first one gives it its model set."""
        own = self.own_token()
        return super().schedulers + tuple(
            ScheduledBy(
                name=each.label,
                urls=each.scheduler,
                token=own if each.token_file is None else TokenFile(each.token_file),
            )
            for each in self.also
        )


_MACHINE_ID = Path("/etc/machine-id")
_LONGEST_HOST = 40
"""Characters of the machine's name in a node id, which has at most 63 characters."""


def lasting_name(service: str, port: int, *, host: str | None = None, machine_id: Path = _MACHINE_ID) -> str:
    """Return the default name of a node, such as "pi-end-8071-3fa9": the same at each start, and different on each
    machine. It begins with the machine's name, so that a token of that name is for it.

    Args:
        host: the machine's name. Default: the system's host name.
        machine_id: a file that distinguishes machines of the same name. If it cannot be read, their nodes get the same
            name.
    """
    host = socket.gethostname() if host is None else host
    short = re.sub("[^a-z0-9]+", "-", host.partition(".")[0].lower())[:_LONGEST_HOST].strip("-")
    try:
        identity = machine_id.read_bytes().strip()
    except OSError:
        identity = b""
    # Not the identity itself, which is not for strangers: see machine-id(5).
    digits = hashlib.sha256(b"terrace node\n" + identity).hexdigest()[:4]
    return "-".join(part for part in (short, service, str(port), digits) if part)


S = TypeVar("S", bound=ServiceSettings)


def load_settings(settings_class: type[S], *, flags: Mapping[str, object], config: Path | None = None) -> S:
    """Settings from all sources; flag beats environment beats TOML file beats default.

    Args:
        flags: values by field name; None means that the flag was not given.
        config: TOML file whose table [<service>] holds settings of this service.

    Raises:
        SetupError: a value is wrong, or a name unknown; the sentence names it and its source.
    """
    prefix = f"TERRACE_{settings_class.service.upper()}_"
    table = _read_table(settings_class, config)
    environment = {name[len(prefix) :].lower(): value for name, value in os.environ.items() if name.startswith(prefix)}
    given = {name: value for name, value in flags.items() if value is not None}

    def fault(error: ErrorDetails) -> str:
        if not error["loc"]:  # settings that do not go together; the sentence names them
            return sentence(error, "", settings_class.model_fields)
        name, *inner = (str(part) for part in error["loc"])
        if inner and name in table and not (name in given or name in environment):
            number = f" {int(inner[0]) + 1}" if inner[0].isdigit() else ""
            where = f"in {config}, table [{name}]{number}" + (f", the key {inner[-1]}" if inner[number != "" :] else "")
            return sentence(error, where, table_fields(settings_class, name))
        if name in given or error["type"] == "missing":
            where = f"the flag --{name.replace('_', '-')}"
        elif name in environment:
            where = f"the environment variable {prefix}{name.upper()}"
        elif name in table:
            where = f"in {config}, table [{settings_class.service}], the key {name}"
        else:  # a default can be wrong beside another setting
            where = f"the default of {name}"
        return f"{where} is no token" if name == "token" else sentence(error, where, settings_class.model_fields)

    try:
        return settings_class(**{**table, **environment, **given})  # type: ignore[arg-type]  # checked by the class
    except ValidationError as exc:
        raise SetupError("; ".join(map(fault, exc.errors()))) from exc


def description(settings_class: type[ServiceSettings], name: str) -> str:
    """Documentation of the field `name`, in one line; a subclass that only changes a default inherits the text."""
    for cls in settings_class.__mro__:
        field = getattr(cls, "model_fields", {}).get(name)
        if field is not None and field.description:
            return " ".join(field.description.split())
    return ""


def table_fields(settings_class: type[ServiceSettings], name: str) -> Mapping[str, FieldInfo]:
    """The fields of a table of the TOML file, by the name of the field that it is read into."""
    kind: Any = settings_class.model_fields[name].annotation
    kind = next((part for part in getattr(kind, "__args__", ()) if isinstance(part, type)), kind)
    fields: Mapping[str, FieldInfo] = kind.model_fields
    return fields


def _read_table(settings_class: type[ServiceSettings], config: Path | None) -> Mapping[str, object]:
    if config is None:
        return {}
    service = settings_class.service
    tables = read_toml(config, what="settings file")
    own = {name: tables[name] for name in settings_class.tables if name in tables}
    for name in tables.keys() - own.keys():
        if close := difflib.get_close_matches(name, settings_class.tables, n=1, cutoff=0.75):
            raise SetupError(f"the settings file {config}: the table [{name}] is unknown; did you mean [{close[0]}]?")
    table = tables.get(service, {} if own else None)
    if not isinstance(table, dict):
        names = ", ".join(f"[{name}]" for name, value in tables.items() if isinstance(value, dict)) or "none"
        raise SetupError(f"the settings file {config} has no table [{service}]; it holds {names}")
    if "token" in table:
        check_private(config.stat(), config, "the settings file with a token,")
    return {**table, **own}
