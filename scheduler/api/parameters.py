"""Parameters that several routes share."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import Header, Path, Query

from tierkit.wire.messages import NODE_ID_PATTERN, NodeId

__all__ = [
    "CURSOR",
    "LIMIT",
    "Bom",
    "Format",
    "LastEventId",
    "NodePath",
    "OnlyNode",
    "OnlySource",
    "SequencePath",
    "SitePath",
    "SourcePath",
]

LIMIT = "Largest number of entries in the answer."
CURSOR = "`next_cursor` of the page before."

NodePath = Annotated[NodeId, Path(description="Id of the node.")]
SitePath = Annotated[str, Path(pattern=NODE_ID_PATTERN, max_length=63, description="Name of the site.")]
SourcePath = Annotated[str, Path(pattern=NODE_ID_PATTERN, description="Name of the source on its node.")]
SequencePath = Annotated[int, Path(ge=1, le=2**53, description="Sequence number of the observation.")]

OnlyNode = Annotated[str | None, Query(pattern=NODE_ID_PATTERN, description="Only sources of this node.")]
OnlySource = Annotated[str | None, Query(pattern=NODE_ID_PATTERN, description="Only this source.")]
Format = Annotated[
    Literal["jsonl", "csv"], Query(description="`jsonl`: one JSON object in each line. `csv`: a table with a header.")
]
Bom = Annotated[bool, Query(description="Begin a CSV with a byte order mark, which spreadsheets need.")]
LastEventId = Annotated[str | None, Header(description="Id of the last event that arrived: continue after it.")]
