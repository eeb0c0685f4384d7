"""The policy of a job: what a user may ask for, and how it is read from a form or a query."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from msgspec import Struct
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from models.escalation import Tuning
from scheduler.core.escalation import JobGate, choose_gates
from tierkit.errors import InvalidInput, NotFound, TerraceError
from tierkit.types import EncodeOn, Escalate, FeatureForm, OnBadInput, Privacy, Recovery, Scheme, UpstreamLoss
from tierkit.wire.messages import SiteName
from tierkit.wire.releases import RELEASE_REF_PATTERN

__all__ = ["JobPolicy", "PolicyRequest", "check_names", "read_policy", "settle"]

Seconds = Annotated[float, Field(gt=0, le=30 * 24 * 3600, allow_inf_nan=False)]


class PolicyRequest(BaseModel):
    """A user's wishes for a job. The scheduler's settings replace None at submission."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    name: Annotated[str, Field(max_length=200)] | None = None
    """A name for people; need not be unique."""

    scheme: Scheme | None = None
    """Tiers that serve a task after the end device: end, end-cloud, end-edge, mapping or adaptive. Default: the
    scheduler's setting."""

    site: SiteName | None = None
    """The site whose nodes answer it. Default: every site, or the only one that the caller may use."""

    release: Annotated[str, Field(pattern=RELEASE_REF_PATTERN)] | None = None
    """The release whose networks answer it, such as flowers@8: the one in force, or one on trial. Default: the one in
    force; during a trial, a share of the jobs belongs to the new one."""

    batch_size: Annotated[int, Field(ge=1, le=256)] = 50
    """Images per task."""

    deadline_s: Seconds | None = None
    """Seconds from submission; images without an answer by then get none. Default: the scheduler's setting (a day)."""

    task_deadline_s: Seconds | None = None
    """Seconds from the first dispatch of a task to its final answer; then the coarse answer is final. Default: the
    scheduler's setting, or the job's own deadline with on_upstream_loss=wait."""

    privacy: Privacy = Privacy.AUTO
    """The form in which images may leave the end device: auto (pixels to trusted nodes, features to the others), none
    (only pixels), conv1 or bottleneck (the features of that encoder, to every upstream node)."""

    encode_on: EncodeOn = EncodeOn.END
    """The place where images are encoded: the end device (end), or a trusted edge node, which gets their pixels and
    forwards the features (edge). A trusted edge node that is itself the upstream node answers from the pixels. auto:
    for each task the way of these two that is expected to take less time, by measurement."""

    feature_form: FeatureForm = FeatureForm.UINT8
    """Encoding of features: uint8, float16 or float32."""

    weight: Annotated[float, Field(ge=0.01, le=100, allow_inf_nan=False)] = 1.0
    """Share of the fleet relative to other jobs: a job of weight 2 gets twice the images of one of weight 1 in the same
    time."""

    recovery: Recovery = Recovery.MONITOR
    """Reaction to a failed attempt: none (the job fails), reassign (the task goes round again over the devices of the
    job's beginning) or monitor (another device of the live list)."""

    on_upstream_loss: UpstreamLoss = UpstreamLoss.FALLBACK
    """Reaction when no upstream node answers: fallback (keep the coarse answer) or wait (until one is back)."""

    on_bad_input: OnBadInput = OnBadInput.FAIL
    """Reaction to pictures that are damaged or cannot be read. `fail`: the upload is refused, or the job fails if a
    node finds the damage. `skip`: they are listed with the reason, and the others are answered. `answer`: like skip,
    but a damaged JPEG is answered from the part that can be decoded."""

    escalate: Escalate = Escalate.ALWAYS
    """Images that go up a tier: always (all), or those whose answer is less sure than a threshold that keeps an
    accuracy (threshold) or a share of the images (budget)."""

    escalate_from: Literal["edge", "end"] = "edge"
    """The lowest tier whose answer may stand: edge (every image gets a fine answer, the unsure ones go to the cloud) or
    end (a sure coarse answer is enough)."""

    escalate_accuracy: Annotated[float, Field(gt=0, le=10, allow_inf_nan=False)] | None = None
    """With escalate=threshold: share of the upper network's accuracy to keep. Default: as tuned (0.99)."""

    escalate_budget: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    """With escalate=budget: share of the images that may go up. Default: as tuned (0.5)."""


class JobPolicy(PolicyRequest):
    """The policy that a job was accepted with: nothing is left open, so it means the same after a restart with other
    settings."""

    scheme: Scheme
    deadline_s: Seconds
    task_deadline_s: Seconds
    gates: tuple[JobGate, ...] = ()
    """The steps up a tier and their thresholds; none if all images go up together."""

    @property
    def release_number(self) -> int:
        """Number of its release; 0 in jobs of an older Terrace: the one in force."""
        return int(self.release.rpartition("@")[2]) if self.release else 0


class JobRules(Struct, frozen=True, kw_only=True):
    """Rules of a job: the release whose networks answer it, and the forms of images that may go up."""

    privacy: Privacy = Privacy.AUTO
    encode_on: EncodeOn = EncodeOn.END
    feature_form: FeatureForm = FeatureForm.UINT8
    as_tuned: bool = False
    """True if only encoders that are cut from the network itself may be used: thresholds were tuned on its answers, and
    a learned encoder has another network behind it."""
    release: int = 0
    """Number of the release whose networks answer; 0: the one in force."""

    @classmethod
    def of(cls, policy: JobPolicy) -> JobRules:
        """The rules of an accepted policy."""
        return cls(
            privacy=policy.privacy,
            encode_on=policy.encode_on,
            feature_form=policy.feature_form,
            as_tuned=bool(policy.gates),
            release=policy.release_number,
        )


_NOT_TUNED = NotFound("nothing was tuned")


def settle(
    request: PolicyRequest,
    *,
    scheme: Scheme,
    deadline_s: float,
    task_deadline_s: float,
    tuning: Tuning | TerraceError = _NOT_TUNED,
) -> JobPolicy:
    """Fill what the request leaves open from the scheduler's settings, and choose the thresholds.

    Args:
        tuning: the thresholds that there are, or why there are none.

    Raises:
        InvalidInput: see `choose_gates`; or features of a learned encoder are requested.
    """
    given: dict[str, Any] = request.model_dump(exclude_none=True)
    if request.on_upstream_loss is UpstreamLoss.WAIT:
        # A task that waits for a node to come back must not be closed in the meantime.
        task_deadline_s = given.get("deadline_s", deadline_s)
    defaults = {"scheme": scheme, "deadline_s": deadline_s, "task_deadline_s": task_deadline_s}
    gates = choose_gates(
        request.escalate,
        request.scheme or scheme,
        tuning,
        lowest=request.escalate_from,
        accuracy=request.escalate_accuracy,
        budget=request.escalate_budget,
    )
    if gates and request.privacy is Privacy.BOTTLENECK:
        raise InvalidInput(
            "thresholds are tuned on the networks themselves, and behind the bottleneck encoder is another: escalate "
            "with privacy 'auto' or 'conv1', or send all images up (escalate=always)"
        )
    return JobPolicy(**{**defaults, **given, "gates": gates})


def check_names(what: str, given: Sequence[str], known: Sequence[str]) -> None:
    """Refuse what a route does not have, or has already: a misspelt name would silently mean the default.

    Raises:
        InvalidInput: with the closest known name.
    """
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            names = f"known are {', '.join(known)}" if known else "there are none here"
            raise InvalidInput(f"unknown {what} {name[:64]!r}: {f'did you mean {close[0]!r}?' if close else names}")
        if given.count(name) > 1:
            raise InvalidInput(f"the {what} {name!r} is given twice")


def read_policy(fields: Iterable[tuple[str, str]]) -> PolicyRequest:
    """A policy from form fields or query parameters; an empty value counts as absent.

    Raises:
        InvalidInput: an unknown field (the message names the closest known one), one given twice, or a wrong value.
    """
    given = [(name, value) for name, value in fields if value]
    check_names("field", [name for name, _ in given], list(PolicyRequest.model_fields))
    try:
        return PolicyRequest.model_validate(dict(given))
    except ValidationError as exc:
        raise InvalidInput("; ".join(f"{error['loc'][0]}: {error['msg']}" for error in exc.errors())) from exc
