"""Requests that no honest client sends, by the million, and whether everybody else is served meanwhile."""
