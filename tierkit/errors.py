"""Every error that Terrace raises on purpose, in one tree.

    TerraceError
    ├── InvalidInput            the caller sent something wrong: change it, do not retry
    │   ├── MalformedMessage    bytes that are not what their header says
    │   ├── UnsupportedMedia    a file of a kind, or with a content, that is not accepted
    │   └── TooLarge            more bytes, pixels or images than the limit
    ├── NotFound                no such job, model, device, route
    ├── Conflict                the request contradicts the present state (a finished job, an old incarnation)
    │   ├── OtherNetworks       a node serves other networks than the fleet: bring it to the scheduler's model set
    │   └── EncoderMismatch     features of another encoder, or of another version of it, than is known here
    ├── Unauthenticated         no token, or one that is unknown, revoked or expired: get a valid one
    ├── Forbidden               the policy, or the role of the token, forbids it (pixels to an untrusted node)
    ├── Unavailable             not now: retry after `retry_after_s`, or elsewhere
    │   ├── Overloaded          a bounded queue is full
    │   ├── LimitReached        the token's own limit of requests, uploads or jobs: wait
    │   ├── Draining            the service is shutting down
    │   ├── Standby             this scheduler does not lead: ask the leader
    │   ├── UpstreamUnavailable another node refused or broke the connection
    │   ├── NoNodeAvailable     the device list has no node for this work
    │   ├── ConnectionEnded     the connection to a receiver of events ended: it is opened again
    │   ├── SourceUnavailable   a source of pictures is away, or sends something else: it is tried again
    │   └── SpoolUnavailable    the spool of a device cannot be written: its disk is full or broken
    ├── DeadlineExceeded        the budget is spent; a retry needs a new budget
    │   └── UpstreamTimeout     another node did not answer within the budget
    ├── UpstreamError           another node answered with an error or with nonsense: try another node
    │   ├── NotTerrace          another program answers at its address: check the URL, or what is in front of it
    │   ├── Rejected            a receiver refuses an event for good: it is put aside
    │   ├── ReceiverGone        a receiver wants no more events: a person must act
    │   ├── InvalidAnswer       its answer contradicts itself, or what was asked: nothing of it is believed
    │   └── CertificateError    TLS does not prove that it is who it should be: a person must act
    └── SetupError              this installation cannot work; a person must act
        ├── MissingExtra        an optional dependency is not installed
        ├── BrokenExtension     a package that extends Terrace cannot be imported, or two add the same name
        ├── ProviderUnavailable the execution provider asked for is not there
        ├── WeightsError        a weights file is missing, damaged or not the one in the manifest
        │   └── WeightsMissing  the scheduler does not have it (any more): ask for its model set again
        ├── NoRoom              the cache of a node takes no file: its disk is full, or read-only
        ├── NeedsRestart        a release that a running node cannot take up: it starts again
        ├── DataError           a data set is missing, damaged or disagrees with its hierarchy
        ├── AddressUnavailable  the address to listen on is not there yet, or its name is unknown: start again later
        │   └── PortInUse       another process listens there
        ├── DatabaseUnavailable the database server is not there yet: start again later
        ├── ClusterUnavailable  the Ray cluster is not there yet: start again later
        └── ServiceFailed       a service of a fleet stopped before it was ready

The HTTP layer has the one table from these classes to status codes (`tierkit.http.errors`).
"""

from __future__ import annotations

from tierkit.distribution import install_command

__all__ = [
    "AddressUnavailable",
    "BrokenExtension",
    "CertificateError",
    "ClusterUnavailable",
    "Conflict",
    "ConnectionEnded",
    "DataError",
    "DatabaseUnavailable",
    "DeadlineExceeded",
    "Draining",
    "EncoderMismatch",
    "Forbidden",
    "InvalidAnswer",
    "InvalidInput",
    "LimitReached",
    "MalformedMessage",
    "MissingExtra",
    "NeedsRestart",
    "NoNodeAvailable",
    "NoRoom",
    "NotFound",
    "NotTerrace",
    "OtherNetworks",
    "Overloaded",
    "PortInUse",
    "ProviderUnavailable",
    "ReceiverGone",
    "Rejected",
    "ServiceFailed",
    "SetupError",
    "SourceUnavailable",
    "SpoolUnavailable",
    "Standby",
    "TerraceError",
    "TooLarge",
    "Unauthenticated",
    "Unavailable",
    "UnsupportedMedia",
    "UpstreamError",
    "UpstreamTimeout",
    "UpstreamUnavailable",
    "WeightsError",
    "WeightsMissing",
]


class TerraceError(Exception):
    """Base of all. `str(error)` is a sentence for the person who has to act on it."""


class InvalidInput(TerraceError):
    """The request is wrong: change it before you send it again."""


class MalformedMessage(InvalidInput):
    """The bytes are not what their header says."""


class UnsupportedMedia(InvalidInput):
    """A file of a kind, or with a content, that is not accepted."""


class TooLarge(InvalidInput):
    """More bytes, pixels or images than the limit that the message names."""


class NotFound(TerraceError):
    """The job, model, device or route does not exist."""


class Conflict(TerraceError):
    """The request contradicts the present state."""


class EncoderMismatch(Conflict):
    """Head and tail of an encoder are not of one version: bring both sides to the same manifest."""


class OtherNetworks(Conflict):
    """A node serves other networks than the fleet: bring it to the scheduler's model set."""


class Unauthenticated(TerraceError):
    """No token, or one that is unknown, revoked or expired."""


class Forbidden(TerraceError):
    """The policy, or the role of the token, forbids it; or a page of another origin has sent it."""


class Unavailable(TerraceError):
    """Not now: try again after `retry_after_s` seconds, or on another node."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Overloaded(Unavailable):
    """A bounded queue is full."""


class LimitReached(Unavailable):
    """The holder of this token has used up its own limit of requests, uploads or jobs."""


class Draining(Unavailable):
    """The service is shutting down and takes no new work."""


class Standby(Unavailable):
    """This scheduler does not lead, and does nothing until it does: ask another one."""


class UpstreamUnavailable(Unavailable):
    """The connection to another node was refused or broke."""


class NoNodeAvailable(Unavailable):
    """The device list has no node for this work."""


class ConnectionEnded(Unavailable):
    """The connection to a receiver of events has ended: it is opened again, and what was under way is sent again."""


class SourceUnavailable(Unavailable):
    """A source of pictures is away, breaks off, or sends something else than pictures. It is tried again."""


class SpoolUnavailable(Unavailable):
    """The spool of a device cannot be written now: its disk is full or broken. Nothing of it is lost."""


class DeadlineExceeded(TerraceError):
    """The time budget is spent."""


class UpstreamTimeout(DeadlineExceeded):
    """Another node did not answer within the budget."""


class UpstreamError(TerraceError):
    """Another node answered with an error, or with an invalid answer."""

    def __init__(self, message: str, *, status_code: int | None = None) -> None:
        super().__init__(message)
        self.status_code = status_code


class NotTerrace(UpstreamError):
    """Another program answers at the address, such as a captive portal: check the URL, or what is in front of it."""


class Rejected(UpstreamError):
    """A receiver refuses an event, and would refuse it each time: it becomes a dead letter."""


class ReceiverGone(UpstreamError):
    """A receiver wants no more events: its sink pauses until a person resumes it."""


class InvalidAnswer(UpstreamError):
    """An answer that contradicts itself, or what was asked for: what it has said before is not believed either."""


class CertificateError(UpstreamError):
    """TLS does not prove that the other side is who it should be, or the two sides do not speak the same protocol."""


class SetupError(TerraceError):
    """This installation cannot work as asked; the message names what a person can do."""


class MissingExtra(SetupError):
    """An optional dependency is not installed."""

    def __init__(self, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs the extra '{extra}': {install_command(extra)}")
        self.extra = extra


class BrokenExtension(SetupError):
    """A package that extends Terrace cannot be used; the message names it. Update or uninstall that package."""


class ProviderUnavailable(SetupError):
    """The execution provider asked for is not there."""


class WeightsError(SetupError):
    """A weights file is missing, damaged, or does not match the manifest."""


class WeightsMissing(WeightsError):
    """Neither this node nor the scheduler has the file: ask the scheduler for its model set again."""


class NoRoom(SetupError):
    """The cache of a node takes no file: its disk is full, or it may not be written. Make room, or name another one."""


class NeedsRestart(SetupError):
    """A running node cannot hold this release next to the present one; it can load it at its start."""

    def __init__(self, message: str, *, is_trouble: bool = False) -> None:
        super().__init__(message)
        self.is_trouble = is_trouble
        """True if the scheduler should hear of it."""


class DataError(SetupError):
    """A data set is missing, damaged, or disagrees with its hierarchy."""


class AddressUnavailable(SetupError):
    """This machine does not have the address to listen on, or its name is unknown: a later start may work."""


class PortInUse(AddressUnavailable):
    """Another process listens on this address."""


class DatabaseUnavailable(SetupError):
    """The database server cannot be reached, or takes no connections now: a later start may work."""


class ClusterUnavailable(SetupError):
    """The Ray cluster that computes the networks cannot be reached: a later start may work."""


class ServiceFailed(SetupError):
    """A service of a fleet stopped before it was ready; `code` is its exit code, negative for a signal."""

    def __init__(self, message: str, *, code: int = 1) -> None:
        super().__init__(message)
        self.code = code
