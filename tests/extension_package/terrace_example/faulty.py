"""A module that cannot be imported."""

raise RuntimeError("the camera library is too old")
