"""The honest requests that the fuzzer starts from: every route of every service, every form of an upload."""

from __future__ import annotations

import io
import json
import zipfile
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any

import numpy as np
from PIL import Image

from models.manifest import Manifest
from tierkit.inference.model import Array
from tierkit.types import Tier
from tierkit.wire.oip import InferRequest, RequestedOutput, Tensor, encode_request

__all__ = ["SCHEDULER", "Template", "corpus"]

SCHEDULER = "scheduler"

_BOUNDARY = "terrace-fuzz"
_STRANGER = "fuzz-1"
"""Node id of the registrations: never one of the real nodes, which others need."""
_OTHER_FORMATS = ("TIFF", "BMP", "GIF", "AVIF", *(["HEIF"] if find_spec("pillow_heif") else []))
_NOBODY = "http://127.0.0.1:9"
"""Where nothing listens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """A request that a service answers."""

    service: str
    """`SCHEDULER`, or the tier of a node."""
    method: str = "GET"
    path: str
    headers: tuple[tuple[str, str], ...] = ()
    """Without Host and Content-Length."""
    body: bytes = field(default=b"", repr=False)


def corpus(manifest: Manifest, images: Array) -> list[Template]:
    """Honest requests to a scheduler, an end node and an edge node.

    Args:
        manifest: of the networks that the nodes serve by default.
        images: UINT8 `[n, 32, 32, 3]`, a few.
    """
    nodes = [template for tier in (Tier.END, Tier.EDGE) for template in _node(manifest, tier, images)]
    return [*_jobs(images), *_fleet(manifest), *_reads(manifest), *nodes]


def _jobs(images: Array) -> list[Template]:
    pictures = {
        f"{number}.{kind.lower()}": _encoded(image, kind)
        for number, (image, kind) in enumerate(zip(images, ("PNG", "JPEG", "WEBP"), strict=False))
    }
    packed, array, arrays = _zip(pictures), io.BytesIO(), io.BytesIO()
    np.save(array, images)
    np.savez_compressed(arrays, images=images, labels=np.zeros(len(images), np.int64))
    chunks, oip = encode_request(InferRequest(inputs=(Tensor("images", images),)))
    form = _form({"scheme": "mapping", "deadline_s": "5", "batch_size": "2", "labels": "[0, 1, 2]"}, pictures)
    bodies: list[tuple[dict[str, str], bytes]] = [
        ({"Content-Type": f"multipart/form-data; boundary={_BOUNDARY}"}, form),
        ({"Content-Type": "application/zip"}, packed),
        ({"Content-Type": "application/zip"}, _zip(pictures, zipfile.ZIP_LZMA)),
        ({"Content-Type": "application/x-npy"}, array.getvalue()),
        ({"Content-Type": "application/x-npz"}, arrays.getvalue()),
        ({"Content-Type": "image/jpeg"}, _progressive()),
        *(({"Content-Type": f"image/{kind.lower()}"}, _encoded(images[0], kind)) for kind in _OTHER_FORMATS),
        ({name: value for name, value in oip.items() if name != "Content-Length"}, b"".join(bytes(c) for c in chunks)),
    ]
    templates = [
        Template(service=SCHEDULER, method="POST", path=path, headers=tuple(headers.items()), body=body)
        for headers, body in bodies
        for path in ("/v1/jobs", "/v1/classify")
    ]
    kept = (*templates[-1].headers, ("Idempotency-Key", "fuzz"))
    query = "/v1/jobs?scheme=end-edge&deadline_s=5&batch_size=2&privacy=auto&on_upstream_loss=wait&name=fuzz"
    return [*templates, replace(templates[-1], path=query, headers=kept)]


def _fleet(manifest: Manifest) -> list[Template]:
    model = manifest.default_for(Tier.EDGE)
    registration = {
        "node_id": _STRANGER,
        "incarnation": "0123456789abcdef",
        "tier": "edge",
        "url": _NOBODY,
        "models": [{"name": model.name, "sha256": model.sha256, "ms_per_image": 1.5}],
        "encoders": [],
        "version": "0.1.0",
        "images_per_minute": 1000,
        "key": "",
    }
    beat = {
        "incarnation": "0123456789abcdef",
        "in_flight": 0,
        "queued_images": 0,
        "running_images": 0,
        "images_done": 10,
        "draining": False,
    }
    node = f"/v1/devices/{_STRANGER}"
    return [
        _json(SCHEDULER, "/v1/devices", registration),
        _json(SCHEDULER, f"{node}/heartbeat", beat),
        Template(service=SCHEDULER, method="POST", path=f"{node}/drain"),
        Template(service=SCHEDULER, method="DELETE", path=f"{node}/drain"),
        Template(service=SCHEDULER, method="DELETE", path=f"{node}?incarnation=0123456789abcdef"),
    ]


def _reads(manifest: Manifest) -> list[Template]:
    model = manifest.default_for(Tier.END)
    job = "/v1/jobs/0123456789abcdef"
    paths = [
        *("/v1/jobs?limit=2&state=completed", job, f"{job}/results?format=csv", f"{job}/attempts?limit=5&task=0"),
        *(f"{job}/explain?limit=5", f"{job}/events?only=state", "/v1/devices", "/v1/mapping?scheme=adaptive&tasks=500"),
        *("/v1/models", "/v1/whoami", "/v1/info", "/docs", "/openapi.json", "/metrics", "/readyz", "/livez"),
    ]
    ranged = (("Range", "bytes=0-99"), ("If-Range", '"0"'))
    weights = Template(service=SCHEDULER, path=f"/v1/models/{model.name}/file?sha256={model.sha256}", headers=ranged)
    # No whole network a hundred thousand times: HEAD asks for all but the bytes.
    return [
        *(Template(service=SCHEDULER, path=path) for path in paths),
        weights,
        Template(service=SCHEDULER, method="HEAD", path=weights.path),
        Template(service=SCHEDULER, method="DELETE", path=job),
    ]


def _node(manifest: Manifest, tier: Tier, images: Array) -> list[Template]:
    model = manifest.default_for(tier).name
    infer = f"/v2/models/{model}/infer"
    asked = InferRequest(id="1", inputs=(Tensor("images", images),), outputs=(RequestedOutput("logits"),))
    top = InferRequest(inputs=(Tensor("images", images),), outputs=(RequestedOutput("logits", classification=3),))
    found = [
        *(Template(service=tier, path=path) for path in ("/v2", "/v2/health/live", "/v2/health/ready", "/metrics")),
        *(Template(service=tier, path=f"/v2/models/{model}{rest}") for rest in ("", "/ready", "/config", "/stats")),
        _infer(tier, infer, asked),
        _infer(tier, infer, top),
        _infer(tier, f"/v2/models/{model}/versions/1/infer", InferRequest(inputs=asked.inputs[:1]), binary=False),
        _json(tier, infer, {"inputs": [{"name": "images", "shape": [1, 1], "datatype": "UINT8", "data": [[1]]}]}),
    ]
    if tier is Tier.END:
        upper = manifest.default_for(Tier.EDGE)
        route = [
            {"node_id": _STRANGER, "url": _NOBODY, "tier": "edge", "model": upper.name, "encoding": None, "key": "k"}
        ]
        task = _infer(tier, "/v1/tasks/job:1", InferRequest(inputs=asked.inputs))
        headers = (
            *task.headers,
            ("Terrace-Budget-Ms", "500"),
            ("Terrace-Upstream", json.dumps(route)),
            ("Terrace-Escalation", json.dumps([{"tier": "edge", "below": 0.5}])),
            ("Terrace-Priority", "interactive"),
            ("Terrace-Stage", "all"),
        )
        found += [task, Template(service=tier, method="POST", path=task.path, headers=headers, body=task.body)]
    return found


def _infer(service: str, path: str, request: InferRequest, *, binary: bool = True) -> Template:
    chunks, headers = encode_request(request, binary=binary)
    kept = tuple((name, value) for name, value in headers.items() if name != "Content-Length")
    return Template(service=service, method="POST", path=path, headers=kept, body=b"".join(map(bytes, chunks)))


def _json(service: str, path: str, content: Any) -> Template:
    headers = (("Content-Type", "application/json"),)
    return Template(service=service, method="POST", path=path, headers=headers, body=json.dumps(content).encode())


def _encoded(image: Array, kind: str) -> bytes:
    written = io.BytesIO()
    if kind == "HEIF":  # which Pillow knows only where somebody has told it
        from pillow_heif import from_pillow

        from_pillow(Image.fromarray(image)).save(written)
    else:
        Image.fromarray(image).save(written, kind)
    return written.getvalue()


def _progressive() -> bytes:
    """A JPEG of 600 x 600 in several scans: they can be cut, repeated and mixed."""
    written = io.BytesIO()
    ramp = np.add.outer(np.arange(600), np.arange(600)) % 256
    Image.fromarray(ramp.astype(np.uint8)).save(written, "JPEG", progressive=True, quality=30)
    return written.getvalue()


def _zip(files: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", method) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return written.getvalue()


def _form(fields: dict[str, str], files: dict[str, bytes]) -> bytes:
    parts = [
        f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
        for name, value in fields.items()
    ]
    parts += [
        f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="images"; filename="{name}"\r\n\r\n'.encode()
        + content
        + b"\r\n"
        for name, content in files.items()
    ]
    return b"".join([*parts, f"--{_BOUNDARY}--\r\n".encode()])
