"""Messages by which a node finds out from whom it gets the file of a network: POST /v1/devices/{node_id}/copies."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from tierkit.wire.messages import PLAIN, Flag, Incarnation, ModelName, NodeUrl, Sha256

__all__ = ["MOST_CHUNKS", "CopyAnswer", "CopyReport"]

MOST_CHUNKS = 512
"""Most chunks of one file: a large file has larger ones."""

Rate = Annotated[float, Field(strict=True, ge=0, le=1e12)]


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class CopyReport(_Message):
    """The state of a node that lacks the file of a network. Sent when something has changed, and every two
    seconds while a copy is under way."""

    incarnation: Incarnation
    """Incarnation of the node's process."""
    name: ModelName
    """The name of the network, or of the part of an encoder."""
    sha256: Sha256
    """sha256 of the file that the node lacks."""
    holds: Annotated[tuple[Sha256, ...], Field(max_length=64)] = ()
    """Whole files that it passes on."""
    plan: Flag = False
    """True if the answer is to have the hashes of the chunks."""
    got: Flag = False
    """True if the node has the file now."""
    bytes_per_s: Rate = 0.0
    """Speed of the last copy."""
    bytes_from_nodes: Annotated[int, Field(ge=0, le=2**40), PLAIN] = 0
    """Bytes of the file that other nodes have sent, with `got`."""
    ended: Flag = False
    """True if the node no longer needs the file, or fetches it from the scheduler outside the tree."""
    failed: Literal["wrong", "lacks", "gone"] | None = None
    """Reason why a copy ended early: the source sent wrong bytes, lacks bytes that it offered, or is gone."""
    failed_source: NodeUrl | None = None
    """The source of that copy; null for the scheduler."""
    waits: Flag = True
    """True if the answer may wait until there is a source."""


class CopyAnswer(_Message):
    """Source from which the node gets the file."""

    key: Annotated[str, Field(pattern=r"^[\w-]{1,100}$", repr=False)]
    """Key that this node shows to the nodes that it copies from, and asks of the nodes that copy from it."""
    go: bool = False
    """False: it has to wait; it asks again."""
    source: NodeUrl | None = None
    """URL of the node to copy from; null for the scheduler."""
    bytes: Annotated[int, Field(ge=0, le=2**40)] = 0
    """The size of the file, with `chunks`."""
    chunk_bytes: Annotated[int, Field(ge=0, le=2**26)] = 0
    """Size of each chunk but the last, in bytes, with `chunks`."""
    chunks: Annotated[tuple[Sha256, ...], Field(max_length=MOST_CHUNKS)] = ()
    """Hash of each chunk, where the report asks for the plan."""
