"""Messages between Terrace's own services (JSON, UTF-8).

Tensors travel in the Open Inference Protocol (`tierkit.wire.oip`), and answers to tasks as lines
(`tierkit.wire.events`). All other messages between services are here: registration and heartbeats (node to scheduler),
and the route of a task (scheduler to end node, in a header). Unknown fields are refused, so that a misspelt field is an
error at once and not a silent default.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    model_validator,
)

from tierkit.types import FeatureForm, Tier

__all__ = [
    "BUDGET_HEADER",
    "ENCODED_HEADER",
    "ESCALATION",
    "ESCALATION_HEADER",
    "INTERACTIVE",
    "LABELS_HEADER",
    "MAX_ALLOWED_UPSTREAMS",
    "NAME_HEADER",
    "NETWORK_HEADER",
    "NODE_HEADER",
    "NODE_ID_PATTERN",
    "PLAIN",
    "PRIORITY_HEADER",
    "RELEASES_HEADER",
    "REQUEST_ID_HEADER",
    "ROUTE_HEADER",
    "STAGE_HEADER",
    "UPSTREAMS",
    "UPSTREAM_HEADER",
    "DeviceRoute",
    "EncoderOffer",
    "Encoding",
    "Flag",
    "Heartbeat",
    "Lease",
    "ModelOffer",
    "NodeId",
    "Registration",
    "Relay",
    "ReleaseTrouble",
    "SiteName",
    "Stage",
    "Upstream",
    "checked_node_id",
    "checked_site",
    "checked_url",
    "classes_digest",
]

REQUEST_ID_HEADER = "X-Request-Id"
"""Follows a task through all hops. Services make one where it is missing, and every answer repeats it."""

BUDGET_HEADER = "Terrace-Budget-Ms"
"""Milliseconds left for this request when it was sent. Remaining time, not a point in time: clocks differ."""

UPSTREAM_HEADER = "Terrace-Upstream"
"""JSON list of `Upstream`, in the order in which the end node must try them; absent or [] for coarse only."""

PRIORITY_HEADER = "Terrace-Priority"
"""`INTERACTIVE`: a person waits for the answer, so the request overtakes batch work in each node's queue."""

INTERACTIVE = "interactive"

STAGE_HEADER = "Terrace-Stage"
"""`fine`: the coarse answer is known, so the end node only asks the upstream nodes; absent or `all`: both stages."""

ESCALATION_HEADER = "Terrace-Escalation"
"""JSON list of `Stage`, from the lowest tier: only images whose answer below is unsure go up to it. The node asks the
nodes of the stage's tier in `UPSTREAM_HEADER`. Absent: all images go to the first of these that answers."""

ENCODED_HEADER = "Terrace-Encoded"
"""JSON `Sent`, in the answer of a node that has encoded and passed on: what went from there to the upstream node."""

NAME_HEADER = "Terrace-Name"
"""Percent-encoded file name of a part of a form, if `filename` cannot hold it."""

NODE_HEADER = "Terrace-Node"
"""Id of the node that speaks to the scheduler. It proves nothing: it lets the scheduler say on its list which node it
has to refuse for its token."""

ROUTE_HEADER = "Terrace-Route"
"""Version of the `DeviceRoute` of a node with sources, in the answer to its heartbeat."""

LABELS_HEADER = "Terrace-Labels"
"""Number of the last change to the labels of the node's pictures. In answers to its heartbeats and observations."""

RELEASES_HEADER = "Terrace-Releases"
"""Numbers of the releases that a node is to hold, in the answer to its registration and to each heartbeat: "8,7". It
answers the pictures of its sources with the first. After a semicolon: how often the scheduler has pruned releases,
so that caches follow ("8,7;2")."""

NETWORK_HEADER = "Terrace-Network"
"""sha256 of the network that gives the coarse answers of a task; absent: the network of the first release. A dot and
the network's `reading` may follow. A node that does not hold it answers 503."""

NODE_ID_PATTERN = r"^[a-z0-9][a-z0-9._-]{0,62}$"


def checked_url(value: str) -> str:
    """An http or https URL with a host, without the slash at its end. Raises ValueError with the rule in words."""
    if not value.startswith(("http://", "https://")):
        raise ValueError("must start with http:// or https://")
    try:
        # urlsplit drops line breaks and keeps backslashes; other parsers see another host behind those.
        if not value.isprintable() or " " in value or "\\" in value:
            raise ValueError
        parts = urlsplit(value)
        usable = bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise ValueError("must name a host, and a port from 1 to 65535, such as http://10.0.0.1:8070")
    if parts.username is not None or parts.password is not None:
        raise ValueError("must hold no user name and no password")
    if parts.query or parts.fragment:
        raise ValueError("must end before ? or #")
    return value.rstrip("/")


def checked_node_id(value: str) -> str:
    """The node id itself. Raises ValueError with the rule in words.

    No node is called like a tier: lists such as the scheduler's `trusted` name tiers and nodes side by side.
    """
    if not re.fullmatch(NODE_ID_PATTERN, value):
        raise ValueError(
            "must be 1 to 63 lower-case letters, digits, dots, dashes and underscores, beginning with a letter or digit"
        )
    if value in tuple(Tier):
        raise ValueError(f"must not be the name of a tier, as {value!r} is: add a number or a name, such as {value}-1")
    return value


def checked_site(value: str) -> str:
    """The name of a site. Raises ValueError with the rule in words."""
    if not re.fullmatch(NODE_ID_PATTERN, value):
        raise ValueError(
            "must be 1 to 63 lower-case letters, digits, dots, dashes and underscores, beginning with a letter or digit"
        )
    return value


def _checked_upper_tier(value: object) -> object:
    if value not in (Tier.EDGE, Tier.CLOUD):
        raise ValueError("must be 'edge' or 'cloud', the tiers above the end devices")
    return value


def classes_digest(names: Sequence[str]) -> str:
    """sha256 of class names in their order: nodes whose answers mean the same have the same."""
    return hashlib.sha256(json.dumps(list(names)).encode()).hexdigest()


UpperTier = Annotated[Tier, BeforeValidator(_checked_upper_tier)]

NodeId = Annotated[str, AfterValidator(checked_node_id), Field(json_schema_extra={"pattern": NODE_ID_PATTERN})]
SiteName = Annotated[str, AfterValidator(checked_site), Field(json_schema_extra={"pattern": NODE_ID_PATTERN})]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
NodeKey = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{0,128}$", repr=False)]
"""Bearer token of one node process; a secret. Empty: it asks for none."""

NoiseKey = Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$", repr=False)]
"""Key of the noise that encoders add to a job's images; a secret of the nodes that get the pixels."""

_PLAIN_NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,119}$"


def checked_model_name(value: str) -> str:
    """The name itself. Raises ValueError with the rule in words."""
    if not re.fullmatch(_PLAIN_NAME_PATTERN, value):
        raise ValueError(
            "must be 1 to 120 letters, digits, dots, dashes and underscores, beginning with a letter or digit"
        )
    return value


ModelName = Annotated[
    str, AfterValidator(checked_model_name), Field(json_schema_extra={"pattern": _PLAIN_NAME_PATTERN})
]
"""Name of a network, or of an encoder's tail, in the manifest."""

EncoderName = Annotated[str, Field(pattern=_PLAIN_NAME_PATTERN)]
"""NETWORK.KIND, as in the manifest; also the name under which a node serves the tail."""


def _plain(value: object) -> object:
    """Refuse a text and a truth value, which pydantic takes for numbers."""
    if isinstance(value, bool | str):
        raise ValueError("write a number")
    return value


PLAIN = BeforeValidator(_plain)
"""For whole numbers; it comes after their bounds. A strict type would refuse 1.0, which JSON Schema takes for one."""
Flag = Annotated[bool, Field(strict=True)]
# Bounds on all numbers, as in `tierkit.wire.events`: what others work out from them must be numbers as well.
Count = Annotated[int, Field(ge=0, le=2**31 - 1), PLAIN]
Total = Annotated[int, Field(ge=0, le=2**53), PLAIN]
"""Count since the start of a process. JSON of other languages holds no larger whole number."""
Period = Annotated[float, Field(strict=True, gt=0, le=1e9)]
"""Seconds; at most some thirty years."""
MAX_ALLOWED_UPSTREAMS = 64
"""Entries of a node's own list of where it may send images."""
Incarnation = Annotated[str, Field(min_length=8, max_length=64)]
NodeUrl = Annotated[
    str, Field(max_length=512, json_schema_extra={"pattern": "^https?://"}), AfterValidator(checked_url)
]


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ModelOffer(_Message):
    """A model that a node holds, and how fast it ran there when the node started."""

    name: ModelName
    """Name of the network, or of an encoder's tail."""
    sha256: Sha256
    """sha256 of its file."""
    ms_per_image: Annotated[float, Field(strict=True, ge=1e-6, le=1e9)]
    """Measured by the node itself at start, batch of 50 unless the network is too slow for that; milliseconds. Of one
    copy of the network, where several compute side by side."""
    classes: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""
    """`classes_digest` of the class names of its answers; "" if it says nothing of them."""
    reading: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""
    """Digest of how it reads pictures; "" if it takes none, or says nothing of that."""


class EncoderOffer(_Message):
    """An encoder of which a node holds the head: it can send features to nodes with that tail."""

    name: EncoderName
    """Name of the encoder: NETWORK.KIND."""
    head: Sha256
    """sha256 of the encoder's head."""
    tail: Sha256
    """sha256 of the matching tail."""


def _different_models(models: tuple[ModelOffer, ...]) -> tuple[ModelOffer, ...]:
    versions = [(model.name, model.sha256, model.reading) for model in models]
    twice = next((version[0] for version in versions if versions.count(version) > 1), None)
    if twice is not None:
        raise ValueError(f"must name each version of a model once, and names {twice!r} twice")
    return models


class ReleaseTrouble(_Message):
    """Release that a node cannot hold, with the reason."""

    release: Annotated[int, Field(ge=1, le=10**9), PLAIN]
    """Number of the release."""
    kind: Literal["room", "unusable", "unreachable"]
    """room: its disk or memory is full. unusable: a network cannot be loaded, differs from its digest, or gives NaN.
    unreachable: a file cannot be fetched now."""
    detail: Annotated[str, Field(max_length=500)]
    """Explanation in words."""


class Registration(_Message):
    """POST /v1/devices: a node asks for a place in the device list. Answered by a `Lease`."""

    node_id: NodeId
    """Id of the node: 1 to 63 lower-case letters, digits, dots, dashes and underscores."""
    incarnation: Incarnation
    """Id of the process, new at each start; work given to an older incarnation is void."""
    tier: Tier
    """Tier of the node."""
    url: NodeUrl
    """URL at which the scheduler and other nodes reach this node."""
    site: SiteName | None = None
    """The place to which it belongs; its pictures stay there unless the scheduler's `share` says otherwise. None: no
    site, or the one of its token."""
    models: Annotated[tuple[ModelOffer, ...], Field(min_length=1, max_length=64), AfterValidator(_different_models)]
    """The networks of its first release come first. There may be several versions of one."""
    follows: Flag = False
    """True if it gets its networks from the scheduler: it loads the networks of the releases in `RELEASES_HEADER`,
    and registers again with them under the same incarnation."""
    encoders: Annotated[tuple[EncoderOffer, ...], Field(max_length=64)] = ()
    """Encoders that it can run for the nodes above it. The tails that it serves itself are among its models."""
    version: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9.+!_-]{0,63}$")]
    """Version of the Terrace distribution that the node runs."""
    images_per_minute: Annotated[int, Field(ge=1, le=10**9), PLAIN] | None = None
    """Power budget: the scheduler gives the node no more than this on average. None: no limit."""
    allowed_upstreams: Annotated[tuple[NodeUrl, ...], Field(max_length=MAX_ALLOWED_UPSTREAMS)] = ()
    """URLs below which a node must lie for this one to send images or features there. Empty: anywhere."""
    key: NodeKey = ""
    """Token that the node accepts from the scheduler, and from the end nodes that it sends there."""
    spool: Annotated[str, Field(pattern=r"^([0-9a-f]{16})?$")] = ""
    """Id of the spool of a node with sources, which only one process can use: a node with the same id and the same
    spool is the same device, wherever it is. "" without sources."""
    lease_s: Period | None = None
    """The lease that it asks for, because each heartbeat costs it bytes: it then takes no tasks. None: the scheduler's
    own."""

    @property
    def sources(self) -> bool:
        """True if it has sources: the scheduler keeps a route for their pictures."""
        return bool(self.spool)


class Lease(_Message):
    """The right to receive tasks, renewed by each heartbeat."""

    lease_s: Period
    """Seconds without a heartbeat after which the node counts as dead."""
    heartbeat_s: Period
    """Seconds between two heartbeats."""


class Heartbeat(_Message):
    """POST /v1/devices/{node_id}/heartbeat. 404 or 409 means: register again."""

    incarnation: Incarnation
    """Incarnation of the node's process."""
    in_flight: Count
    """Requests being answered."""
    queued_images: Count
    """Images that wait for their batch."""
    running_images: Count = 0
    """Images of the batch that is being computed."""
    images_done: Total
    """Images computed since the node started; a count that does not rise under load shows a node without progress."""
    draining: Flag = False
    """True if it takes no tasks now: it shuts down, an operator has unloaded a model of it, or its model process is
    away."""
    replicas: Annotated[int, Field(ge=1, le=10**6), PLAIN] = 1
    """Copies of its models that compute side by side now. The speeds in its registration are for one copy."""
    troubles: Annotated[tuple[ReleaseTrouble, ...], Field(max_length=8)] = ()
    """Releases in `RELEASES_HEADER` that it cannot hold. It tries again, more and more rarely."""


class Encoding(_Message):
    """Send features of this encoder, and in no case pixels."""

    name: EncoderName
    """Name of the encoder: NETWORK.KIND."""
    head: Sha256
    """sha256 of the encoder's head."""
    tail: Sha256
    """Digests of both parts: features of one version never meet the tail of another."""
    form: FeatureForm = FeatureForm.UINT8
    """Number format of the features."""
    noise_key: NoiseKey = ""
    """Key of the noise that is added to images: the same key adds the same noise. Empty: the node chooses a key."""


class Relay(_Message):
    """A trusted node that takes the pixels, encodes them and passes the features on."""

    node_id: NodeId
    """Id of the node."""
    url: NodeUrl
    """URL of the node."""
    key: NodeKey = ""
    """Token that this node accepts."""


class Upstream(_Message):
    """One upstream node that an end node may ask for the fine answer."""

    node_id: NodeId
    """Id of the upstream node."""
    url: NodeUrl
    """URL of the upstream node."""
    tier: UpperTier
    """Tier of the node: `edge` or `cloud`."""
    model: ModelName
    """Network that the node is asked for."""
    sha256: Sha256 | None = None
    """sha256 of that model; another version of it must not answer. None: any may. The scheduler always sets it."""
    reading: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""
    """`ModelOffer.reading` of that version. "": the node's choice, if it has two that differ in nothing else."""
    encoding: Encoding | None
    """Encoder whose features the node gets; None: it may see pixels. The field has no default, so that it is never
    left out by mistake."""
    relay: Relay | None = None
    """The node that encodes in the end node's place; only with `encoding`."""
    key: NodeKey = ""
    """Token that this node accepts."""

    @model_validator(mode="after")
    def _relay_encodes(self) -> Upstream:
        if self.relay is not None and self.encoding is None:
            raise ValueError("a relay is there to encode: name the encoding")
        return self


class Stage(_Message):
    """A tier that is asked about the images that are unsure below it."""

    tier: UpperTier
    """Tier that is asked: `edge` or `cloud`."""
    below: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    """Images go up whose margin below (largest minus second largest probability) is smaller than this; None: all."""
    spare: bool = True
    """True if the images that the stage before this one should have answered, but did not, go up as well."""
    only: tuple[Count, ...] | None = None
    """Positions of the images that go up, in rising order, if the sender knows them: `CoarseEvent.unsure` of the answer
    that it already has. None: `below` decides."""


class DeviceRoute(_Message):
    """GET /v1/devices/{node_id}/route: where a device's own pictures may go for a better answer. It is the mapping of
    the scheduler for this device, and stays in force while the scheduler is away."""

    version: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    """Changes with anything in it."""
    upstreams: tuple[Upstream, ...]
    """Upstream nodes in the order in which they are asked."""
    stages: tuple[Stage, ...] = ()
    """Tiers to which unsure pictures go, one after the other, with their thresholds. Empty: there are no thresholds for
    the network of this device."""
    reason: str = ""
    """Origin of the route, or why it leads nowhere."""
    learn: bool = False
    """True if the device may keep pictures to learn from."""


ESCALATION: TypeAdapter[tuple[Stage, ...]] = TypeAdapter(tuple[Stage, ...])
"""Reads and writes the escalation header."""

UPSTREAMS: TypeAdapter[tuple[Upstream, ...]] = TypeAdapter(tuple[Upstream, ...])
"""Reads and writes the upstream header."""
