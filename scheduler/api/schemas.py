"""Answers of the API that the client passes on as plain JSON; the others are in `tierkit.wire.api`."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from encryption.audit.kept import KeptAudit
from scheduler.placement.adaptive.encoding import EncodingEstimate
from scheduler.placement.adaptive.pilot import LinkEstimate, NodeEstimate
from tierkit.types import Scheme, Tier

__all__ = ["AdaptiveReport", "AuditReport", "MappingReport", "Pair", "SignIn", "SiteMapping", "WhoAmI"]


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
