"""The spool of a device: observations and pictures that wait there, in one file of SQLite with a bound on its size."""

from end_node.spool.rows import Draft, Held, SpoolStats
from end_node.spool.spool import Spool

__all__ = ["Draft", "Held", "Spool", "SpoolStats"]
