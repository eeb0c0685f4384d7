"""A naive cascade: FastAPI, an ONNX Runtime session in a thread pool, and httpx to the next service.

    python naive.py PORT MODEL THREADS [NEXT_URL]

POST /answer takes the UINT8 pixels of CIFAR images. It answers with a line of labels from its own session and, if there
is a next service, one from there. The file runs as a script and imports nothing of Terrace.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import numpy as np
import uvicorn
from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import StreamingResponse

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # as in Terrace's own services
import onnxruntime as ort

PORT, MODEL, THREADS = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
NEXT = sys.argv[4] if len(sys.argv) > 4 else None
SHAPE = (32, 32, 3)

options = ort.SessionOptions()
options.intra_op_num_threads = THREADS
session = ort.InferenceSession(MODEL, options, providers=["CPUExecutionProvider"])
http: httpx.AsyncClient


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    global http
    async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
        yield


app = FastAPI(lifespan=lifespan)


def infer(body: bytes) -> list[int]:
    images = np.frombuffer(body, np.uint8).reshape(-1, *SHAPE)
    labels: list[int] = session.run(["logits"], {"images": images})[0].argmax(axis=1).tolist()
    return labels


def line(event: str, labels: Any) -> bytes:
    return json.dumps({"event": event, "labels": labels}).encode() + b"\n"


@app.get("/ready")
async def ready() -> dict[str, bool]:
    return {"ready": True}


@app.post("/answer")
async def answer(request: Request) -> StreamingResponse:
    body = await request.body()

    async def lines() -> AsyncIterator[bytes]:
        yield line("coarse", await run_in_threadpool(infer, body))
        if NEXT is not None:
            reply = await http.post(f"{NEXT}/answer", content=body)
            yield line("fine", reply.raise_for_status().json()["labels"])

    return StreamingResponse(lines(), media_type="application/x-ndjson")


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=PORT, log_level="warning", access_log=False)
