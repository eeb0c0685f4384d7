"""The main road of a request: its time by part."""
