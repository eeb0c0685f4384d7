"""A trace follows a job from the client through all services."""

import io
import json
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from models.data import read_sample
from tierkit.client import AsyncClient
from tierkit.fleet import LaunchOptions, launch, local_plan
from tierkit.testing import wait_for
from tierkit.types import Tier

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def upload(images: int) -> bytes:
    file = io.BytesIO()
    np.save(file, read_sample().images[:images])
    return file.getvalue()


class Logs:
    """What the services of a fleet log, in JSON."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, dict[str, Any]]] = []

    def on_line(self, name: str, line: str) -> None:
        if line.startswith("{"):
            self.lines.append((name, json.loads(line)))

    def says(self, trace_id: str, begins: str, services: set[str]) -> bool:
        """Whether these services, and no others, have logged such lines of this trace."""
        return services == {
            name
            for name, line in self.lines
            if line.get("trace_id") == trace_id and str(line["message"]).startswith(begins)
        }


async def test_from_the_client_to_the_last_node(tmp_path: Path) -> None:
    logs, settings = Logs(), {"log_level": "debug", "log_format": "json"}
    plan = local_plan(
        {Tier.END: 1, Tier.EDGE: 1, Tier.CLOUD: 1},
        scheduler={"port": 0, "state": tmp_path / "state", "trusted": "end,edge", **settings},
        node=settings,
    )
    # The edge node is the relay: it encodes for the cloud, which is not trusted.
    query = {"scheme": "end-cloud", "encode_on": "edge"}
    async with (
        launch(plan, tmp_path, LaunchOptions(on_line=logs.on_line)) as fleet,
        AsyncClient(fleet.scheduler_url) as client,
        httpx.AsyncClient(base_url=fleet.scheduler_url, timeout=60) as http,
    ):
        await fleet.join(budget_s=20)
        for given in (
            {"traceparent": f"00-{TRACE}-{SPAN}-00", "tracestate": "foo=1"},
            {"traceparent": "00-broken"},
            {},
        ):
            is_known = TRACE in given.get("traceparent", "")
            logs.lines.clear()
            headers = {"Content-Type": "application/x-npy", **given}
            answer = await http.post("/v1/jobs", params=query, content=upload(100), headers=headers)
            assert answer.status_code == 202, answer.text
            job = await client.wait(answer.json()["id"], budget_s=60)
            assert (job.state, job.answered_fine) == ("completed", 100)
            (trace_id,) = {line["trace_id"] for _, line in logs.lines if line["message"] == "job accepted"}
            assert (trace_id == TRACE) is is_known
            for begins, services in (
                ("POST /v1/relay/", {"edge-1"}),
                ("POST /v2/models/", {"cloud-1"}),
                ("task done", {"scheduler", "end-1"}),
            ):
                await wait_for(partial(logs.says, trace_id, begins, services), what=begins)
            # Requests at once belong to the trace of their caller as well.
            answer = await http.post("/v1/classify", params=query, content=upload(1), headers=headers)
            assert answer.status_code == 200, answer.text
            assert (json.loads(answer.text.splitlines()[-1])["trace_id"] == TRACE) is is_known
