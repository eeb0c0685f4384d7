"""Requests that no honest client sends, by the million, and whether other clients are served meanwhile."""
