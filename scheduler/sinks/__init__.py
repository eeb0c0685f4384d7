"""Sinks: receivers outside of Terrace to which events are delivered."""
