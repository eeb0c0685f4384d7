"""The answers of a network to the probe pictures, computed in a process that ends afterwards: its memory is free again,
and a network that crashes ONNX Runtime harms nothing else."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from models.manifest import Manifest, ModelEntry
from models.session import load_model
from tierkit.errors import InvalidInput, MissingExtra, SetupError
from tierkit.tensors import Array

__all__ = ["compute", "probe_pictures"]

OUTPUT = "probabilities"
_BUDGET_S = 120.0
_CELLS = 4
"""Fields of colour in a row of a probe picture."""
_COLOURS = ((230, 30, 30), (30, 230, 30), (30, 30, 230), (20, 20, 20), (240, 240, 240), (220, 200, 30))


def probe_pictures(height: int, width: int) -> Array:
    """Pictures of coloured fields, each with a colour that prevails, UINT8 `[6, height, width, 3]`: the same ones
    everywhere."""
    shape = (len(_COLOURS), _CELLS, _CELLS, 3)
    fields = np.random.Generator(np.random.PCG64(1)).integers(0, 256, shape, np.uint8).astype(np.uint16)
    fields = (fields + 2 * np.array(_COLOURS, np.uint16)[:, None, None]) // 3
    rows, columns = (np.arange(size) * _CELLS // size for size in (height, width))
    return np.ascontiguousarray(fields.astype(np.uint8)[:, rows][:, :, columns])


async def compute(manifest: Manifest, entry: ModelEntry, path: Path) -> Any:
    """Probabilities of a network for the probe pictures, as lists; None if ONNX Runtime is not installed.

    Raises:
        InvalidInput: it cannot be loaded, crashes, takes too long, or gives NaN or infinity.
    """
    asked = {"entry": entry.model_dump(mode="json"), "labels": manifest.labels(entry), "path": str(path)}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", __spec__.name),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(_BUDGET_S):
            said, _ = await process.communicate(json.dumps(asked).encode())
    except TimeoutError as exc:
        raise InvalidInput(f"the network {entry.name!r} takes longer than {_BUDGET_S:g} s for a few pictures") from exc
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        raise InvalidInput(f"the network {entry.name!r} crashes ONNX Runtime")
    found = json.loads(said)
    if "error" in found:
        raise InvalidInput(f"the network {entry.name!r} cannot be used: {found['error']}")
    return found["answers"]


def _answer(asked: Any) -> dict[str, Any]:
    entry, path = ModelEntry.model_validate(asked["entry"]), Path(asked["path"])
    try:
        model = load_model(entry.model_copy(update={"file": path.name}), path.parent, labels=asked["labels"])
    except MissingExtra:
        return {"answers": None}
    except SetupError as exc:
        return {"error": str(exc)}
    images = probe_pictures(*entry.input_shape[:2])
    found = model.run({model.inputs[0].name: images}, [OUTPUT])[OUTPUT]
    if not np.isfinite(found).all():
        return {"error": "it answers probe pictures with NaN or infinity"}
    return {"answers": np.round(found.astype(np.float64), 4).tolist()}


if __name__ == "__main__":
    json.dump(_answer(json.load(sys.stdin)), sys.stdout)
