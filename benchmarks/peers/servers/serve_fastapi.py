"""The server that one writes first: FastAPI, one route, the model called in it."""

from __future__ import annotations

import uvicorn
from common import HOST, PORT, decode, infer, open_session  # type: ignore[import-not-found]  # beside this file, which runs as a script
from fastapi import FastAPI, Request, Response

session = open_session()
app = FastAPI()


@app.post("/predict")
async def predict(request: Request) -> Response:
    logits = infer(session, decode(await request.body()))
    return Response(logits.tobytes(), media_type="application/octet-stream")


if __name__ == "__main__":
    uvicorn.run(app, host=HOST, port=PORT, log_level="warning", access_log=False)
