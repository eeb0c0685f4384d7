"""Open Inference Protocol v2 over HTTP for a set of `ModelRunner`s, with the extensions for binary tensors,
classification, statistics and model configuration: `oip_routes(...)` gives the routes."""

from tierkit.inference.endpoints.infer import InferEndpoint
from tierkit.inference.endpoints.routes import EXTENSIONS, oip_routes

__all__ = ["EXTENSIONS", "InferEndpoint", "oip_routes"]
