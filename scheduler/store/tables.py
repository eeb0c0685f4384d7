"""The tables. A change of their form adds a migration in `migrations/versions` and raises SCHEMA.

A result is keyed (job, task, stage), so the database itself refuses a second answer to the same question. Its `payload`
is the line that answered, as it came over the wire: the labels and confidences of all images of the task in one row.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    TypeDecorator,
)
from sqlalchemy.engine import Dialect

__all__ = [
    "SCHEMA",
    "VERSION_TABLE",
    "attempts",
    "dead_letters",
    "hierarchies",
    "improvements",
    "inputs",
    "jobs",
    "labels",
    "lease",
    "metadata",
    "networks",
    "nodes",
    "observation_gaps",
    "observation_pictures",
    "observation_sources",
    "observations",
    "outbox",
    "properties",
    "releases",
    "results",
    "rollouts",
    "runs",
    "sinks",
    "sites",
    "source_rights",
]

VERSION_TABLE = "terrace_schema"
"""Table in which Alembic notes the revision of the tables."""

SCHEMA = "0012"
"""The revision that these tables are of: the newest in `migrations/versions`."""


class _Plain(TypeDecorator[str]):
    """Words of others, without what no database holds: the character 0 in PostgreSQL, half characters in all."""

    impl: Any

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        return None if value is None else value.replace("\0", "\ufffd").encode(errors="replace").decode()


class PlainText(_Plain):
    """Text of any length."""

    impl = Text
    cache_ok = True


class PlainString(_Plain):
    """Text of a length that the database may check."""

    impl = String
    cache_ok = True


metadata = MetaData()

properties = Table(
    "terrace_properties",
    metadata,
    Column("name", String(64), primary_key=True),
    Column("value", String(256), nullable=False),
)

# Which scheduler leads, in one row; times by the clock of the database. See `scheduler.store.lease`.
lease = Table(
    "terrace_lease",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),  # 1
    Column("epoch", BigInteger, nullable=False),  # one more with each new leader
    Column("url", Text, nullable=False),  # of the leader
    Column("expires_at", Float(53), nullable=False),
    Column("awaited_until", Float(53), nullable=False),  # until then a standby may be waiting for the lease
    Column("commits", BigInteger, nullable=False),  # number of the latest transaction of this epoch
)

# Copies of the files of unfinished jobs, in parts, where schedulers share the database.
inputs = Table(
    "terrace_inputs",
    metadata,
    Column("sha256", String(64), primary_key=True),
    Column("part", Integer, primary_key=True),
    Column("content", LargeBinary, nullable=False),
)

# The networks that answer, as numbered rows.
releases = Table(
    "terrace_releases",
    metadata,
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("name", String(63), nullable=False),
    Column("digest", String(64), nullable=False),  # sha256 of manifest and thresholds
    Column("manifest", Text, nullable=False),  # JSON
    Column("tuning", Text),  # JSON; null without thresholds
    Column("origin", PlainText, nullable=False),  # the scheduler's folder from which it was made; "" if uploaded
    Column("created_at", Float(53), nullable=False),
    Column("created_by", String(63), nullable=False),
    Column("probes", Text),  # JSON object: answers to the probe pictures by sha256; null until they are known
)

# The changes from one release to another. The newest that is done says which release is in force.
rollouts = Table(
    "terrace_rollouts",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("state", String(16), nullable=False),
    Column("content", Text, nullable=False),  # JSON of scheduler.core.release.ReleaseChange
    Column("trial", Text),  # JSON of scheduler.core.guards.Trial and the guards as they were judged last
)

# Copies of the files of networks, in parts, where schedulers share the database.
networks = Table(
    "terrace_networks",
    metadata,
    Column("sha256", String(64), primary_key=True),
    Column("part", Integer, primary_key=True, autoincrement=False),
    Column("content", LargeBinary, nullable=False),
)

# What the numbers in labels and results mean. A scheduler may serve another model set than the one before it did.
hierarchies = Table(
    "terrace_hierarchies",
    metadata,
    Column("sha256", String(64), primary_key=True),
    Column("content", Text, nullable=False),  # JSON
)

# The nodes that have registered and have not taken their leave, and what operators want with them.
nodes = Table(
    "terrace_nodes",
    metadata,
    Column("id", String(63), primary_key=True),
    Column("registration", Text, nullable=False),  # JSON, without the node's key
    Column("drained", Boolean, nullable=False),
    Column("removed", Boolean, nullable=False),
    Column("trusted", Boolean),  # null: as the setting says
    Column("said_by", String(63), nullable=False),
)

# The sites that nodes have named, and what operators want with them.
sites = Table(
    "terrace_sites",
    metadata,
    Column("name", String(63), primary_key=True),
    Column("drained", Boolean, nullable=False),
    Column("removed", Boolean, nullable=False),
    Column("said_by", String(63), nullable=False),
)

jobs = Table(
    "terrace_jobs",
    metadata,
    # Begins with the time of submission, so that the order of ids is the order of jobs.
    Column("id", String(32), primary_key=True),
    Column("name", PlainString(200)),
    Column("owner", String(63)),  # name of the token; null where none was asked for
    Column("state", String(16), nullable=False, index=True),
    Column("reason", PlainText, nullable=False),
    Column("policy", Text, nullable=False),  # JSON
    Column("images", Integer, nullable=False),
    Column("tasks", Integer, nullable=False),
    Column("input_sha256", String(64), nullable=False),
    Column("hierarchy", String(64)),  # sha256; null in jobs of an older Terrace until a scheduler starts
    Column("labels", LargeBinary),  # little-endian int32 per image, -1 for unknown
    Column("names", PlainText),  # JSON list
    Column("resized", Text),  # JSON object: image number to [height, width] as sent
    Column("damaged", Text),  # JSON object: image number to what is wrong with it
    Column("resized_images", Integer, nullable=False),
    Column("idempotency_key", String(255), unique=True),
    Column("fingerprint", String(64), nullable=False),
    Column("traceparent", String(55)),  # of W3C Trace Context; null in jobs of an older Terrace
    # Wall clock, seconds since 1970, for people.
    Column("created_at", Float(53), nullable=False),
    Column("started_at", Float(53)),
    Column("finished_at", Float(53)),
    # Deadlines and retention count elapsed time. See `tierkit.elapsed`.
    Column("deadline_elapsed", Float(53), nullable=False),
    Column("started_elapsed", Float(53)),
    Column("finished_elapsed", Float(53)),
    Column("summary", Text),  # JSON, written once with the final state
    Column("site", String(63)),  # where it runs; null: anywhere
)

# One row per attempt that has ended. It outlives a restart, so a task that no node can do is given up after the same
# number of attempts.
attempts = Table(
    "terrace_attempts",
    metadata,
    Column("job_id", ForeignKey(jobs.c.id), primary_key=True),
    Column("task", Integer, primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("node_id", String(63), nullable=False),
    Column("incarnation", String(64), nullable=False),
    Column("tier", String(8), nullable=False),
    Column("upstream", String(63)),  # the upstream node that was to be asked first
    Column("stage", String(8), nullable=False),  # all | fine
    Column("hedge", Boolean, nullable=False),
    Column("outcome", String(16), nullable=False),
    Column("reason", PlainText, nullable=False),
    Column("why", PlainText, nullable=False),  # the reason of the choice of these nodes
    Column("started_at", Float(53), nullable=False),
    Column("ended_at", Float(53), nullable=False),
)

results = Table(
    "terrace_results",
    metadata,
    Column("job_id", ForeignKey(jobs.c.id), primary_key=True),
    Column("task", Integer, primary_key=True),
    Column("stage", String(8), primary_key=True),  # coarse | final
    # Order of commitment over all jobs: what the event stream resumes by.
    Column("seq", BigInteger, nullable=False, unique=True),
    Column("kind", String(8), nullable=False),  # coarse | fine | fallback | failed
    Column("ms", Float(53), nullable=False),  # from the task's first dispatch to this answer
    Column("request_id", String(128), nullable=False),
    Column("payload", Text, nullable=False),  # a line of tierkit.protocol.TaskEvent
    Column("site", String(63)),  # of the device, in a coarse answer; null: no site
)

Index("terrace_results_by_job", results.c.job_id, results.c.seq)

# Training runs. A host chooses the id; what it reports of a run under way is written every few seconds.
runs = Table(
    "terrace_runs",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("owner", String(63)),  # name of the host's token
    Column("network", PlainString(200), nullable=False),
    Column("strategy", PlainString(200), nullable=False),
    Column("steps", BigInteger, nullable=False),
    Column("url", Text, nullable=False),  # of the host
    Column("incarnation", PlainString(64), nullable=False),  # of the host
    Column("state", String(16), nullable=False),  # running | stopping | stopped | finished | failed
    Column("reason", PlainText, nullable=False),  # why it failed or stopped
    Column("created_at", Float(53), nullable=False),
    Column("heard_at", Float(53), nullable=False),  # the host's latest report
    Column("heard_elapsed", Float(53)),  # the same, as elapsed time
    Column("finished_at", Float(53)),
    Column("done", BigInteger, nullable=False),  # steps
    Column("version", BigInteger, nullable=False),  # of the weights
    Column("loss", Float(53)),
    Column("accuracy", Float(53)),
    Column("worker_count", Integer, nullable=False),
    Column("missing", Integer),  # workers that must come before it begins
    Column("config", Text, nullable=False),  # JSON object
    Column("workers", Text, nullable=False),  # JSON list of tierkit.wire.runs.WorkerReport
    Column("curve", Text, nullable=False),  # JSON list of the fields of scheduler.core.curve.Point
    Column("result", Text),  # JSON object, of the last report
    Column("more_urls", Text, nullable=False, server_default="[]"),  # JSON list: where else the host is
    Column("wants", Text, nullable=False, server_default="{}"),  # JSON of tierkit.wire.runs.RunWants
)

Index("terrace_runs_by_time", runs.c.created_at, runs.c.id)

# What the sources of devices have seen.
observations = Table(
    "terrace_observations",
    metadata,
    Column("node_id", String(63), primary_key=True),
    Column("source", String(63), primary_key=True),
    Column("sequence", BigInteger, primary_key=True),
    Column("revision", BigInteger, nullable=False),
    # Rises with each observation that is stored or amended, over all sources; no number comes twice.
    Column("received", BigInteger, nullable=False, unique=True),
    Column("taken_at", Float(53), nullable=False),  # wall clock, seconds since 1970, for people
    Column("labelled", Boolean, nullable=False),  # true if the device knew the time
    Column("stored_elapsed", Float(53), nullable=False, index=True),  # by which it is deleted
    Column("hierarchy", String(64), nullable=False),  # sha256, of the classes that the labels number
    # The answer in force; null if the picture cannot be read.
    Column("coarse_label", Integer),  # the superclass, also of an answer that names a class
    Column("fine_label", Integer),  # the class; null if the tier `end` answers
    Column("confidence", Float(53)),
    Column("tier", String(8)),
    Column("unsure", Boolean, nullable=False),
    Column("waits", Boolean, nullable=False),
    Column("content", Text, nullable=False),  # JSON of tierkit.wire.observations.Observation
    Column("site", String(63)),  # of the node when it was stored; null: no site
    # Whether the two answers to an audited picture have the same superclass; null if it has not both, or is none.
    Column("agrees", Boolean),
)

Index("terrace_observations_by_time", observations.c.taken_at)
Index("terrace_observations_by_source", observations.c.node_id, observations.c.source, observations.c.taken_at)
Index("terrace_observations_by_coarse", observations.c.coarse_label, observations.c.taken_at)
Index("terrace_observations_by_fine", observations.c.fine_label, observations.c.taken_at)
Index("terrace_observations_by_site", observations.c.site, observations.c.taken_at)

Index(
    "terrace_observations_audited",
    observations.c.received,
    sqlite_where=observations.c.agrees.is_not(None),
    postgresql_where=observations.c.agrees.is_not(None),
)

# The numbering of each source.
observation_sources = Table(
    "terrace_observation_sources",
    metadata,
    Column("node_id", String(63), primary_key=True),
    Column("source", String(63), primary_key=True),
    Column("spool", String(16), nullable=False),  # id of the spool that numbers its observations
    Column("highest", BigInteger, nullable=False),  # sequence number
    Column("stored_elapsed", Float(53), nullable=False),  # the latest batch
)

# Numbers that never come. Those of one source neither overlap nor touch.
observation_gaps = Table(
    "terrace_observation_gaps",
    metadata,
    Column("node_id", String(63), primary_key=True),
    Column("source", String(63), primary_key=True),
    Column("first", BigInteger, primary_key=True),
    Column("last", BigInteger, nullable=False),
    Column("stored_elapsed", Float(53), nullable=False, index=True),
)

# The latest pictures of each source whose device sends them.
observation_pictures = Table(
    "terrace_observation_pictures",
    metadata,
    Column("node_id", String(63), primary_key=True),
    Column("source", String(63), primary_key=True),
    Column("sequence", BigInteger, primary_key=True),
    Column("stored_elapsed", Float(53), nullable=False, index=True),
    Column("content", LargeBinary, nullable=False),
    Column("useful", Float(53)),  # of a label for it, by scheduler.core.learning; null: the answers raise no question
)

Index(
    "terrace_observation_pictures_by_use",
    observation_pictures.c.useful,
    observation_pictures.c.node_id,
    observation_pictures.c.source,
    observation_pictures.c.sequence,
)

# Labels of people, as a log: the row of a picture that is current counts, and says who set it or took it back.
labels = Table(
    "terrace_labels",
    metadata,
    Column("number", BigInteger, primary_key=True, autoincrement=False),  # rises; devices ask for what came after one
    Column("node_id", String(63), nullable=False),
    Column("source", String(63), nullable=False),
    Column("sequence", BigInteger, nullable=False),
    Column("label", Integer),  # number of the class; null: taken back
    Column("hierarchy", String(64), nullable=False),  # sha256, of the classes that the label numbers
    Column("said_by", String(63)),  # name of a token; null where none was asked for
    Column("said_at", Float(53), nullable=False),  # wall clock, seconds since 1970
    Column("current", Boolean, nullable=False),
    Column("stored_elapsed", Float(53), nullable=False, index=True),
)

Index("terrace_labels_of_picture", labels.c.node_id, labels.c.source, labels.c.sequence, labels.c.current)
Index("terrace_labels_of_node", labels.c.node_id, labels.c.number)

# What came of the newest attempts to improve a release.
improvements = Table(
    "terrace_improvements",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("created_at", Float(53), nullable=False),
    Column("said_by", String(63)),  # name of the token
    Column("content", Text, nullable=False),  # JSON of tierkit.wire.learning.Improvement
)

# The users who may see a source.
source_rights = Table(
    "terrace_source_rights",
    metadata,
    Column("name", String(63), primary_key=True),  # of a token
    Column("node_id", String(63), primary_key=True),
    Column("source", String(63), primary_key=True),
    Column("owner", Boolean, nullable=False),  # otherwise a reader
)

# Receivers of events.
sinks = Table(
    "terrace_sinks",
    metadata,
    Column("name", String(63), primary_key=True),
    Column("kind", String(63), nullable=False),
    Column("filter", Text, nullable=False),  # JSON of scheduler.core.outbox.EventFilter
    Column("options", Text, nullable=False),  # JSON object
    Column("created_by", String(63)),  # name of a token; null where none was asked for
    Column("created_at", Float(53), nullable=False),  # wall clock, seconds since 1970
    Column("paused", Boolean, nullable=False),
    Column("reason", PlainText, nullable=False),  # why it is paused
    Column("position", BigInteger, nullable=False),  # all events up to this number are dealt with
    Column("dropped", BigInteger, nullable=False),  # events that were deleted before the receiver had them
    Column("lost_letters", BigInteger, nullable=False),  # dead letters that were too many
)

# Events that sinks want, in the order in which they became true: no number comes twice, and none comes late.
outbox = Table(
    "terrace_outbox",
    metadata,
    Column("number", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True),
    Column("type", String(63), nullable=False),
    Column("key", String(255), nullable=False),
    Column("at", Float(53), nullable=False),  # wall clock, seconds since 1970
    Column("stored_elapsed", Float(53), nullable=False),  # by which it is deleted
    Column("content", Text, nullable=False),  # JSON object
    sqlite_autoincrement=True,
)

# Events that a receiver refused, or did not take in time.
dead_letters = Table(
    "terrace_dead_letters",
    metadata,
    Column("sink", String(63), primary_key=True),
    Column("number", BigInteger, primary_key=True, autoincrement=False),  # of the event
    Column("reason", PlainText, nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("at", Float(53), nullable=False),  # when it was given up, seconds since 1970
    Column("wanted", Boolean, nullable=False),  # it is to be delivered again
    Column("content", Text, nullable=False),  # JSON of scheduler.core.outbox.Event
)
