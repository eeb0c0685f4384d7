"""The job API in Python: `AsyncClient`, and `Client` for programs without an event loop.

with Client("http://127.0.0.1:8070") as terrace:
    job = terrace.wait(terrace.submit("photos.zip"))
    print(job.answered_fine, job.images_per_s)
"""

from tierkit.client.aio import AsyncClient, ObservationFilters, PictureFilters
from tierkit.client.blocking import Client
from tierkit.client.files import Files, gather, shortened
from tierkit.client.http import DEFAULT_URL, Backoff
from tierkit.client.uploads import Images, Labels, PolicyFields
from tierkit.types import JobState, RunState
from tierkit.wire.api import (
    Attempt,
    AttemptPage,
    CoarseAnswer,
    CoarseResults,
    Decision,
    Device,
    Event,
    Explanation,
    FailedResults,
    FallbackResults,
    FineAnswer,
    FineResults,
    ImageResult,
    Job,
    JobPage,
    NodeShare,
    SiteNow,
    StateChange,
)
from tierkit.wire.learning import Improvement, LearningNow, NodeLearning
from tierkit.wire.releases import GuardName, GuardNow, Pruned, ReleaseList, ReleaseNow, Rollout, RolloutState
from tierkit.wire.runs import CurvePoint, Run, RunPage, RunProgress, RunSummary, RunWorker
from tierkit.wire.sinks import DeadLetterNow, DeadLetterPage, SinkFilter, SinkList, SinkNow
from tierkit.wire.sources import ObservationPage, SeenGap, SeenPicture, SourceNow, SourceRights, SourcesReport

__all__ = [
    "DEFAULT_URL",
    "AsyncClient",
    "Attempt",
    "AttemptPage",
    "Backoff",
    "Client",
    "CoarseAnswer",
    "CoarseResults",
    "CurvePoint",
    "DeadLetterNow",
    "DeadLetterPage",
    "Decision",
    "Device",
    "Event",
    "Explanation",
    "FailedResults",
    "FallbackResults",
    "Files",
    "FineAnswer",
    "FineResults",
    "GuardName",
    "GuardNow",
    "ImageResult",
    "Images",
    "Improvement",
    "Job",
    "JobPage",
    "JobState",
    "Labels",
    "LearningNow",
    "NodeLearning",
    "NodeShare",
    "ObservationFilters",
    "ObservationPage",
    "PictureFilters",
    "PolicyFields",
    "Pruned",
    "ReleaseList",
    "ReleaseNow",
    "Rollout",
    "RolloutState",
    "Run",
    "RunPage",
    "RunProgress",
    "RunState",
    "RunSummary",
    "RunWorker",
    "SeenGap",
    "SeenPicture",
    "SinkFilter",
    "SinkList",
    "SinkNow",
    "SiteNow",
    "SourceNow",
    "SourceRights",
    "SourcesReport",
    "StateChange",
    "gather",
    "shortened",
]
