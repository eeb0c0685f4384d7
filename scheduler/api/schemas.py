"""Answers of the API that the client passes on as plain JSON; the others are in `tierkit.wire.api`."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from encryption.audit.kept import KeptAudit
from scheduler.placement.adaptive.encoding import EncodingEstimate
from scheduler.placement.adaptive.pilot import LinkEstimate, NodeEstimate
from tierkit.types import Scheme, Tier
from tierkit.wire.api import TaskResults

__all__ = [
    "AdaptiveReport",
    "AuditReport",
    "ClassTree",
    "ClassifiedImages",
    "ClassifyDone",
    "ClassifyError",
    "LinkReport",
    "MappingReport",
    "NetworkInput",
    "Pair",
    "SchedulerInfo",
    "SignIn",
    "SiteMapping",
    "UploadLimits",
    "WhoAmI",
]


class SignIn(BaseModel):
    """Token that a browser exchanges for a session."""

    model_config = ConfigDict(extra="forbid")

    token: str = Field(max_length=512, description="Token of a user, an operator or an admin.")


class WhoAmI(BaseModel):
    """The holder of the token, or of the session, that came with the request; nulls where no token is asked for."""

    name: str | None = Field(default=None, description="Name of the token.")
    role: str | None = Field(default=None, description="Role of the token: user, operator, admin, node or worker.")
    expires: datetime | None = Field(
        default=None, description="Time until which the token is valid; null: until it is revoked."
    )
    sites: tuple[str, ...] = Field(default=(), description="The only sites that a user may see and use. Empty: all.")


class UploadLimits(BaseModel):
    """Limits on uploads."""

    max_images: int = Field(description="Images of one job.")
    max_upload_bytes: int = Field(description="Bytes of one upload.")
    max_pixels: int = Field(description="Pixels of one image.")
    max_file_bytes: int = Field(description="Bytes of one image file.")
    max_inflated_bytes: int = Field(description="Bytes of one archive after it is decompressed.")
    classify_max_images: int = Field(description="Images of one `POST /v1/classify`.")


class NetworkInput(BaseModel):
    """The input of a network."""

    name: str = Field(description="Name of the network.")
    tier: Tier = Field(description="Tier whose nodes serve it.")
    height: int = Field(description="Height of its input in pixels.")
    width: int = Field(description="Width of its input in pixels.")
    resize: str = Field(description="Rule by which images with another size are resized.")
    resize_to: int | None = Field(description="Side in pixels to which images are resized before they are cropped.")
    resample: str = Field(description="Filter that is used to resize.")


class ClassTree(BaseModel):
    """The classes that the fleet answers."""

    name: str = Field(description="Name of the hierarchy.")
    fine: list[str] = Field(description="Names of the classes.")
    coarse: list[str] = Field(description="Names of the superclasses.")
    parent: list[int] = Field(description="Index of the superclass of each class.")


class SchedulerInfo(BaseModel):
    """Facts about a scheduler and its fleet that rarely change."""

    version: str = Field(description="Version of Terrace.")
    limits: UploadLimits = Field(description="Bounds on what a client may upload.")
    input_shape: list[int] = Field(description="Height, width and channels of the end devices' network.")
    samples: int = Field(description="Number of test pictures at `GET /v1/samples/{index}`; 0 for other classes.")
    audit: bool = Field(description="True if the fleet has an audit of its encoders.")
    share: list[str] = Field(description="Rules on the pictures that leave a site: SITE=RULE, or a rule for all sites.")
    networks: list[NetworkInput] = Field(description="Inputs of the networks in force.")
    hierarchy: ClassTree = Field(description="Names of the classes.")


class Pair(BaseModel):
    """Upstream nodes of an end device."""

    end: str = Field(description="Id of the end device.")
    upstream: list[str] = Field(description="Ids of the upstream nodes, in the order in which the device tries them.")
    shared: int = Field(description="Number of these nodes, from the first, that take turns.")
    reason: str = Field(description="Reason for these upstream nodes.")


class AdaptiveReport(BaseModel):
    """The estimates that the scheme `adaptive` decides by. Links appear once an answer has passed them."""

    nodes: list[NodeEstimate] = Field(description="Estimates of the nodes.")
    links: list[LinkEstimate] = Field(description="Estimates of the links between end devices and upstream nodes.")


class LinkReport(BaseModel):
    """The seconds to a tier and back, t^c of the formulas."""

    set_s: float | None = Field(
        description="Seconds that the operator has set (`end_link_s`, `edge_link_s`, `cloud_link_s`); null if not set."
    )
    measured_s: float | None = Field(description="Seconds measured from answers; null before the first.")
    used_s: float = Field(description="Seconds that the formulas use: the operator's, otherwise the measured ones.")


class SiteMapping(BaseModel):
    """The figures of a site in the mapping."""

    site: str = Field(description="Name of the site.")
    n_map: int | None = Field(
        description="End devices for each edge node (Eq. 4); null without end devices or edge nodes."
    )
    n_map_reason: str = Field(description="Explanation of `n_map`.")
    theta_cloud: float | None = Field(description="The cloud's planned share of the site's tasks (Eq. 5).")
    cloud_share: float | None = Field(description="The cloud's actual share, as in the mapping of the fleet.")
    cloud_nodes: float = Field(
        description="Share of the cloud nodes that belong to no site, in nodes: in proportion to the "
        "end devices for which the edge nodes of each site have no place."
    )


class MappingReport(BaseModel):
    """The mapping of the fleet as it is now, and the paper's formulas with its figures."""

    scheme: Scheme = Field(description="Scheme that the figures are for.")
    scheme_default: Scheme = Field(description="Scheme of jobs that name none.")
    site: str | None = Field(description="Site that the figures are about; null: the nodes of no site.")
    n_map: int | None = Field(
        description="End devices for each edge node (Eq. 4); null without end devices or edge nodes."
    )
    n_map_reason: str = Field(description="Explanation of `n_map`.")
    theta_cloud: float | None = Field(description="The cloud's planned share of the tasks, Eq. 5.")
    cloud_share: float | None = Field(
        description="The cloud's actual share of the images that upstream nodes answered in the scheme `mapping` since "
        "the planned share last changed; null before the first."
    )
    pairs: list[Pair] = Field(description="Upstream nodes of the site's end devices, or of all end devices.")
    formulas: dict[str, dict[str, Any]] = Field(
        description="Formulas and figures of the site, or of the nodes of no site."
    )
    links: dict[Tier, LinkReport] = Field(description="From the scheduler to an end device, and from there upwards.")
    sites: list[SiteMapping] = Field(description="Each site of the fleet, if it has any.")
    encoding: list[EncodingEstimate] = Field(
        description="Measured times to encode an image, of the end devices and edge nodes that have encoded."
    )
    adaptive: AdaptiveReport | None = Field(description="Estimates of the scheme `adaptive`; null for other schemes.")


class AuditReport(KeptAudit):
    """Results of attacks on the encoders: the parts of pictures that their features gave away."""

    source: Literal["state", "models", "bundled"] = Field(
        description="Place of the audit: the state folder, the model set, or the networks bundled with Terrace."
    )
    outdated: tuple[str, ...] = Field(
        description="Encoders whose head is another one in this fleet, or missing: the figures do not apply to these."
    )


class ClassifiedImages(TaskResults):
    """Answers of one stage in the stream of `POST /v1/classify`."""

    event: Literal["coarse", "fine", "fallback", "failed"] = Field(description="The stage.")


class ClassifyDone(BaseModel):
    """Last line of the stream of `POST /v1/classify`: every image has its final answer."""

    event: Literal["done"] = Field(description="Always `done`.")
    images: int = Field(description="Number of images.")
    elapsed_ms: float = Field(description="Milliseconds until the last answer, without the upload.")
    request_id: str = Field(description="Id of the request, as in the logs.")
    trace_id: str = Field(description="Trace of the request, 32 hex digits.")
    release: str | None = Field(description="Release whose networks answered; null: the scheduler has none.")


class ClassifyError(BaseModel):
    """Last line of the stream of `POST /v1/classify` after a failure."""

    event: Literal["error"] = Field(description="Always `error`.")
    error: str = Field(description="Reason, in one sentence.")
