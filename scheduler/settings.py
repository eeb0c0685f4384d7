"""Settings of the scheduler."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
)

from scheduler.core.health import DetectorTimes
from scheduler.core.limits import TaskLimits
from scheduler.core.site import SharePolicy
from tierkit.access import Proxies, Role, checked_network, checked_root_path
from tierkit.settings import CommaSeparated, Port, ServiceSettings, UserPath, split_commas
from tierkit.types import Scheme, Share
from tierkit.wire.messages import NODE_ID_PATTERN

__all__ = ["SchedulerSettings"]


Network = Annotated[str, AfterValidator(checked_network)]
CommaSeparatedNetworks = Annotated[tuple[Network, ...], BeforeValidator(split_commas)]


class SchedulerSettings(ServiceSettings):
    """The scheduler: takes jobs, keeps the device list, and spreads the work."""

    callers: ClassVar[tuple[Role, ...]] = ("user", "node", "worker", "guest")
    service: ClassVar[str] = "scheduler"

    port: Port = 8070
    """TCP port to listen on; 0 lets the system choose a free one, which the ready file and the log then name."""

    max_body_bytes: PositiveInt = 1024**3
    """Largest upload in bytes; a larger one is refused with 413 as soon as this is known."""

    root_path: Annotated[str, AfterValidator(checked_root_path)] = ""
    """Path under which a reverse proxy serves the scheduler, such as /terrace. Default: the proxy's
    X-Forwarded-Prefix."""

    trusted_proxies: CommaSeparatedNetworks = ("127.0.0.0/8", "::1")
    """Addresses and networks, comma-separated, of trusted reverse proxies. Their X-Forwarded-Prefix, -Proto, -Host
    and -Port give the path, scheme and name that browsers use. Default: this machine's addresses."""

    state: UserPath = Path(".terrace/scheduler")
    """Folder for the database, the pixels of unfinished jobs and uploads under way. Each scheduler has its own."""

    database: str | None = None
    """SQLAlchemy URL of the database (async driver). If several schedulers share a database, one leads and the
    others stand by. Default: an SQLite file in the state folder."""

    leader_lease_s: PositiveFloat = 5.0
    """Seconds after the last renewal of the lease at which another scheduler of the same database takes over."""

    models: UserPath | None = None
    """Model set, whose networks nodes may fetch: a folder with manifest, networks and thresholds. Default: Terrace's
    own."""

    scheme: Scheme = Scheme.MAPPING
    """Scheme of jobs that do not name one: end, end-cloud, end-edge, mapping or adaptive."""

    n_map: PositiveInt | None = None
    """End devices per edge node in the scheme `mapping`. Default: the paper's Eq. 4 over the nodes' measured speeds."""

    end_link_s: NonNegativeFloat | None = None
    """Seconds to bring a task to an end device and its answer back (t^c_end), used in Eq. 1 to 6. Default: as
    measured."""

    edge_link_s: NonNegativeFloat | None = None
    """Seconds between an end device and an edge node, there and back (t^c_edge), used in Eq. 3 to 6. Default: as
    measured."""

    cloud_link_s: NonNegativeFloat | None = None
    """Seconds between an end device and the cloud, there and back (t^c_cloud), used in Eq. 2 to 6. Default: as
    measured."""

    window: Annotated[int, Field(ge=1, le=64)] = 3
    """Tasks that an end device may have outstanding; 1 sends one at a time, as the paper did. In the scheme
    `adaptive`, only tasks count whose coarse answer the device owes; the estimates limit those that wait for
    upstream nodes."""

    order: Literal["free", "sequential"] = "free"
    """Order in which end devices get tasks, one after the other. If the next device has a full window, `free` takes the
    one after it, and `sequential` waits for it as the paper does. The cloud then gets its share by Eq. 5, and the
    slowest device sets the pace."""

    trusted: CommaSeparated = ("end", "edge")
    """Tiers and node ids that may see pixels, comma-separated."""

    share: CommaSeparated = (Share.CLOUD,)
    """Rule for pictures that leave their site: none, cloud (to cloud nodes without a site) or sites (also to edge
    nodes of other sites while the site's own are dead or full). Rules for single sites may follow, such as
    cloud,shop-7=none."""

    heartbeat_s: PositiveFloat = 0.2
    """Seconds between two heartbeats of a node."""

    suspect_s: PositiveFloat = 0.5
    """Longest silence before a node is suspect; a node with regular heartbeats is suspect earlier."""

    probe_s: PositiveFloat = 0.4
    """Seconds in which a suspect node must answer the scheduler's probe; a silent node that does not answer is dead."""

    lease_s: PositiveFloat = 3.0
    """Silence after which a node is dead, even if it answers probes. Its tasks then go to others."""

    stall_s: PositiveFloat = 5.0
    """Seconds without progress after which a node with work is suspect; a slow node gets more time."""

    set_aside_s: PositiveFloat = 1.0
    """Seconds for which a node gets no tasks after a wrong answer. The time doubles with each further wrong answer
    in a row, up to 30."""

    deadline_s: PositiveFloat = 24 * 3600.0
    """Largest number of seconds from the submission of a job to its end, if the job sets no deadline."""

    task_deadline_s: PositiveFloat = 300.0
    """Seconds from the first dispatch of a task to its final answer, if the job sets no other time."""

    coarse_timeout_s: PositiveFloat = 30.0
    """Seconds in which an end device must give the coarse answer; otherwise another device gets the task."""

    max_attempts: Annotated[int, Field(ge=1, le=5)] = 5
    """Attempts that may fail before a task is given up."""

    retries_per_s: PositiveFloat = 20.0
    """Retries and hedges that each job may make per second; further ones wait."""

    retry_burst: PositiveInt = 100
    """Retries and hedges that a job may make at once, if it has made few before."""

    hedge: bool = False
    """If a task takes longer than 95 % of its job's tasks on the same device, and another device is idle, make a
    second attempt there. The first answer counts."""

    acknowledge_s: PositiveFloat = 0.5
    """Seconds in which a device must acknowledge a task of a job with recovery=reassign (t_comm of the paper)."""

    max_images: PositiveInt = 100_000
    """Largest number of images in one job."""

    max_unfinished_jobs: PositiveInt = 1000
    """Largest number of jobs that wait or run, including uploads of jobs; further jobs are refused with 503."""

    max_pixels: Annotated[int, Field(ge=1, le=2**28)] = 64 * 1024**2
    """Largest number of pixels of one image, checked before it is decoded. A JPEG that is not progressive may have
    four times as many, up to 268435456: it is decoded at a half to an eighth of its size."""

    max_file_bytes: PositiveInt = 64 * 1024**2
    """Largest single image file, in an upload or in a zip."""

    max_inflated_bytes: PositiveInt = 4 * 1024**3
    """Largest number of bytes to which one archive in an upload may unpack."""

    decoders: Annotated[int, Field(ge=1, le=32)] = 2
    """Number of pictures that are decoded at the same time; uploads take turns."""

    retention_s: PositiveFloat = 7 * 24 * 3600.0
    """Seconds for which the scheduler keeps observations, finished jobs with their results, and ended training runs."""

    max_observations: PositiveInt = 1_000_000
    """Largest number of observations that the scheduler keeps; it deletes the oldest first. A million takes about
    500 MB of the database."""

    sink_retry_s: PositiveFloat = 24 * 3600.0
    """Seconds after which an event becomes a dead letter if the receiver of its sink does not take it."""

    sink_keep_s: PositiveFloat = 7 * 24 * 3600.0
    """Seconds after which an event is deleted, even if a sink has not delivered it, such as a paused sink."""

    sink_allow_private: bool = False
    """Let sinks connect to private addresses and to the scheduler's own machine. Link-local addresses and the metadata
    services of clouds are never allowed."""

    learn: bool = False
    """Let devices keep pictures for learning, if the device and its source allow it too."""

    @field_validator("trusted")
    @classmethod
    def _tiers_and_node_ids(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            if not re.fullmatch(NODE_ID_PATTERN, name):
                raise ValueError(f"{name!r} is neither a tier (end, edge, cloud) nor a node id")
        return value

    @field_validator("share")
    @classmethod
    def _rules_of_sites(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        SharePolicy.read(value)
        return value

    @field_validator("suspect_s", "lease_s")
    @classmethod
    def _longer_than_the_one_before(cls, value: float, info: ValidationInfo) -> float:
        shorter = "heartbeat_s" if info.field_name == "suspect_s" else "suspect_s"
        if shorter in info.data and value <= info.data[shorter]:
            raise ValueError(f"must be longer than {shorter} ({info.data[shorter]:g})")
        return value

    @property
    def proxies(self) -> Proxies:
        return Proxies(self.root_path, self.trusted_proxies)

    @property
    def detector_times(self) -> DetectorTimes:
        return DetectorTimes(
            heartbeat_s=self.heartbeat_s,
            suspect_s=self.suspect_s,
            probe_s=self.probe_s,
            lease_s=self.lease_s,
            stall_s=self.stall_s,
            set_aside_s=self.set_aside_s,
        )

    @property
    def task_limits(self) -> TaskLimits:
        return TaskLimits(
            max_attempts=self.max_attempts,
            coarse_timeout_s=self.coarse_timeout_s,
            task_deadline_s=self.task_deadline_s,
            acknowledge_s=self.acknowledge_s,
            set_aside_s=self.set_aside_s,
            retries_per_s=self.retries_per_s,
            retry_burst=self.retry_burst,
        )

    @property
    def sharing(self) -> SharePolicy:
        return SharePolicy.read(self.share)

    @property
    def inputs(self) -> Path:
        """Folder for the pixels of unfinished jobs."""
        return self.state / "inputs"

    @property
    def shares_database(self) -> bool:
        """True if other schedulers may use the same one."""
        return self.database is not None

    @property
    def database_url(self) -> str:
        return self.database or f"sqlite+aiosqlite:///{self.state.absolute() / 'scheduler.db'}"
