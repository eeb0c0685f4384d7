"""The routes of the protocol."""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tierkit.inference.endpoints import describe
from tierkit.inference.endpoints.control import control_routes
from tierkit.inference.endpoints.infer import InferEndpoint
from tierkit.inference.endpoints.lookup import Models
from tierkit.inference.repository import Repository
from tierkit.inference.versions import Versions

__all__ = ["EXTENSIONS", "oip_routes"]

EXTENSIONS = ("binary_tensor_data", "classification", "statistics", "model_configuration", "model_repository")


def oip_routes(
    models: Versions,
    infer: InferEndpoint,
    repository: Repository,
    *,
    ready: Callable[[], bool],
    version: str,
    server_name: str = "terrace",
) -> list[Route]:
    """Routes of the Open Inference Protocol for these models.

    Args:
        models: all that the node holds.
        infer: answers the inference requests.
        repository: of the same models.
        ready: True if the node takes requests now for the models that it serves.
        version: of the server, as its metadata shows it.
        server_name: of the server, as its metadata shows it.
    """
    found = Models(models)

    async def server_metadata(_request: Request) -> Response:
        return JSONResponse({"name": server_name, "version": version, "extensions": EXTENSIONS})

    async def live(_request: Request) -> Response:
        return JSONResponse({"live": True})

    async def server_ready(_request: Request) -> Response:
        all_ready = ready() and repository.whole
        return JSONResponse({"ready": all_ready}, 200 if all_ready else 503)

    async def model_ready(request: Request) -> Response:
        runner = found.runner(request.scope)
        one_ready = ready() and not runner.not_served
        return JSONResponse({"name": runner.model.name, "ready": one_ready}, 200 if one_ready else 503)

    async def model_metadata(request: Request) -> Response:
        runner = found.runner(request.scope)
        return JSONResponse(describe.metadata(runner, found.versions(runner.model.name)))

    async def model_config(request: Request) -> Response:
        return JSONResponse(describe.config(found.runner(request.scope)))

    async def model_statistics(request: Request) -> Response:
        return JSONResponse({"model_stats": [describe.statistics(found.runner(request.scope))]})

    async def all_statistics(_request: Request) -> Response:
        return JSONResponse({"model_stats": [describe.statistics(runner) for runner in found]})

    model = "/v2/models/{model}"
    version_of = model + "/versions/{version}"
    return [
        # First, for routes are tried in turn.
        Route(f"{model}/infer", infer, methods=["POST"]),
        Route(f"{version_of}/infer", infer, methods=["POST"]),
        *control_routes(found, repository),
        Route("/v2", server_metadata),
        Route("/v2/", server_metadata),  # some descriptions of the protocol write it so
        Route("/v2/health/live", live),
        Route("/v2/health/ready", server_ready),
        Route("/v2/models/stats", all_statistics),
        *(
            Route(prefix + suffix, endpoint)
            for prefix in (model, version_of)
            for suffix, endpoint in (
                ("", model_metadata),
                ("/ready", model_ready),
                ("/config", model_config),
                ("/stats", model_statistics),
            )
        ),
    ]
