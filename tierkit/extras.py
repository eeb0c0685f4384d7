"""Errors for extras of the package that are not installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tierkit.errors import MissingExtra

__all__ = ["training_extra"]


@contextmanager
def training_extra(purpose: str, extra: str = "train") -> Iterator[None]:
    """Context for imports that need torch.

    Raises:
        MissingExtra: the extra is not installed.
    """
    try:
        yield
    except ImportError as error:
        name = (error.name or "").partition(".")[0]
        if name == "onnxruntime":
            raise MissingExtra("cpu", purpose) from error
        if name in {"torch", "torchvision", "onnx", "onnxscript", "matplotlib", "safetensors"}:
            raise MissingExtra(extra, purpose) from error
        raise
