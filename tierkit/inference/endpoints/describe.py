"""Answers of the protocol's GET routes about a model. Pure: a runner in, JSON values out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tierkit.inference.runner import ModelRunner
from tierkit.tensors import TensorSpec

__all__ = ["config", "metadata", "statistics"]


def metadata(runner: ModelRunner, versions: Sequence[str]) -> dict[str, Any]:
    """Model metadata, with facts from the manifest under `parameters`.

    Args:
        versions: all that the node holds of the model.
    """
    model = runner.model
    return {
        "name": model.name,
        "versions": list(versions),
        "platform": model.platform,
        "inputs": [_tensor(spec) for spec in model.inputs],
        "outputs": [_tensor(spec) for spec in model.outputs],
        "parameters": {"sha256": model.sha256, **model.parameters},
    }


def config(runner: ModelRunner) -> dict[str, Any]:
    """Model configuration, in the form of Triton's extension `model_configuration`; dimensions without the batch."""
    model = runner.model
    return {
        "name": model.name,
        "platform": model.platform,
        "backend": model.platform.partition("_")[0],
        "version_policy": {"latest": {"num_versions": 1}},
        "max_batch_size": runner.max_batch_size,
        "input": [_tensor_config(spec) for spec in model.inputs],
        "output": [_tensor_config(spec) for spec in model.outputs],
        "instance_group": [{"name": model.name, "kind": "KIND_AUTO", "count": 1}],
        "dynamic_batching": {
            "max_queue_delay_microseconds": round(runner.max_queue_delay_s * 1e6),
            "default_queue_policy": {"timeout_action": "REJECT", "max_queue_size": runner.max_queue_images},
        },
    }


def statistics(runner: ModelRunner) -> dict[str, Any]:
    """One entry of `model_stats` in Triton's extension `statistics`."""
    return {"name": runner.model.name, "version": runner.model.sha256, **runner.statistics.as_json()}


def _tensor(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "datatype": spec.datatype, "shape": list(spec.shape)}


def _tensor_config(spec: TensorSpec) -> dict[str, Any]:
    datatype = "STRING" if spec.datatype == "BYTES" else spec.datatype
    return {"name": spec.name, "data_type": f"TYPE_{datatype}", "dims": list(spec.shape[1:])}
