"""The fleet of an experiment: real services as processes of this machine, with the speeds and links of a profile.

Every node listens on a separate loopback address (`profile.address_of`) and has its own file of links. If the speed of
a tier is emulated, the real answers of its network to the same images are computed beforehand, and the record says so.
The nodes share the cores of this machine, and a batch that waits for a core would be later than on a separate machine.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from encryption.serving import HeadModel, TailModel
from experiments.emulation.compute import Answers
from experiments.profile import Profile, address_of, write_links
from models.data import ImageSet, read_cifar100, read_sample
from models.manifest import EncoderEntry, Manifest, ModelEntry, Side, load_manifest
from models.session import OnnxModel, load_encoder, load_model
from tierkit.client import AsyncClient, Device
from tierkit.errors import DeadlineExceeded, InvalidInput
from tierkit.fleet import SCHEDULER, FleetPlan, ServicePlan
from tierkit.inference.model import Model
from tierkit.tensors import Array
from tierkit.types import EncoderKind, FeatureForm, Tier

__all__ = [
    "BATCH",
    "Encoding",
    "Network",
    "bare_labels",
    "check_fleet",
    "head_ms_per_image",
    "measure_networks",
    "plan_fleet",
    "read_metrics",
    "read_tasks",
    "task_s",
    "wait_for_devices",
    "with_answers",
]

BATCH = 50
"""Images of a task, as in the paper."""

_SPEED_RUNS = 5
_METRICS_S = 60.0
_DEVICES_S = 60.0
_THREADS = os.cpu_count() or 1
_TAIL_IMAGES = 1000
"""Images whose features are held in memory at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """Form in which images go up instead of pixels."""

    kind: EncoderKind
    form: FeatureForm = FeatureForm.UINT8


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Network of a tier in an experiment, and the source of its answers."""

    tier: Tier
    name: str
    real_ms_per_image: float
    """Measured now, on one core of this machine."""
    emulated_ms_per_image: float | None
    answers: Path | None = None
    """File of answers computed beforehand; None if the network really runs."""

    def __str__(self) -> str:
        if self.emulated_ms_per_image is None:
            return f"{self.tier}: {self.name} at its real speed"
        return (
            f"{self.tier}: {self.name} at an emulated {self.emulated_ms_per_image:g} ms/image (really "
            f"{self.real_ms_per_image:.2f} on one core), its real answers to these images computed beforehand"
        )


def read_tasks(tasks: int, data: Path | None) -> tuple[ImageSet, str]:
    """Read the images of `tasks` tasks of 50 test images, and describe them.

    Args:
        data: folder with CIFAR-100; without it, the bundled sample of its test set.
    """
    images = read_sample() if data is None else read_cifar100("test", data)
    wanted = tasks * BATCH
    source = "the bundled sample of CIFAR-100 test images" if data is None else "the CIFAR-100 test set"
    if wanted > len(images):
        source += f" of {len(images):,}, repeated"
    return images.take(np.arange(wanted) % len(images)), f"{wanted:,} images: {source}"


def task_s(profile: Profile, tier: Tier) -> float:
    """Emulated seconds that a task takes on a node of a tier (the paper's t^p).

    Raises:
        InvalidInput: the tier has no emulated speed.
    """
    ms = profile.compute_ms_per_image.of(tier)
    if ms is None:
        raise InvalidInput(
            "this experiment compares with what machines of a known speed can do, and the profile says nothing of the "
            f"tier {tier}: give it compute_ms_per_image.{tier}, or take a profile that has it, such as paper"
        )
    return ms * BATCH / 1000


def measure_networks(profile: Profile, names: Mapping[Tier, str] | None = None) -> list[Network]:
    """The networks of the profile's tiers and their speeds on this machine, without answers.

    Args:
        names: names of networks that replace a tier's first one.
    """
    manifest, sample = load_manifest(), read_sample().images[:BATCH]
    found = []
    for tier in Tier:
        if profile.nodes.of(tier):
            name = (names or {}).get(tier)
            entry = manifest.default_for(tier) if name is None else manifest.entry(name)
            real_ms, emulated_ms = _real_ms(load_model(entry), sample), profile.compute_ms_per_image.of(tier)
            found.append(
                Network(tier=tier, name=entry.name, real_ms_per_image=real_ms, emulated_ms_per_image=emulated_ms)
            )
    return found


def with_answers(network: Network, images: Array, folder: Path, encoding: Encoding | None) -> Network:
    """Compute the network's answers to these images and store them in a file in `folder`.

    Args:
        encoding: form in which images will also go to upstream nodes; the tail's answers are stored as well.
    """
    manifest = load_manifest()
    entry, path = manifest.entry(network.name), folder / f"{network.name}.npz"
    if not path.exists():
        distinct = images[list({image.tobytes(): index for index, image in enumerate(images)}.values())]
        answers = Answers.compute(load_model(entry, threads=_THREADS), distinct, batch=BATCH)
        if encoding is not None:
            for encoder in _tails(manifest, network.name, encoding):
                answers = _with_tail(answers, encoder, entry, encoding.form, distinct)
        answers.save(path)
    return replace(network, answers=path)


def _tails(manifest: Manifest, network: str, encoding: Encoding) -> list[EncoderEntry]:
    """Encoders whose tails' answers can be computed beforehand. A tail in a separate file really runs, and so does the
    tail of an encoder with noise, whose features are never the same.
    """
    whole = manifest.entry(network).sha256
    return [
        encoder
        for encoder in manifest.encoders
        if encoder.kind is encoding.kind and encoder.tail.sha256 == whole and not encoder.noise
    ]


def bare_labels(tier: Tier, images: Array) -> Array:
    """Labels, int `[n]`, that the default network of a tier gives to images, with no service around it."""
    model = load_model(load_manifest().default_for(tier), threads=_THREADS)
    batches = [images[at : at + BATCH] for at in range(0, len(images), BATCH)]
    return np.concatenate([model.run({"images": batch}, ["logits"])["logits"].argmax(axis=1) for batch in batches])


async def wait_for_devices(
    client: AsyncClient, lacking: Callable[[Sequence[Device]], str], poll_s: float = 0.02
) -> None:
    """Read the device list until nothing is lacking.

    Args:
        lacking: what is, in words; "" for nothing.

    Raises:
        DeadlineExceeded: something still is after a minute.
    """
    deadline = time.monotonic() + _DEVICES_S
    while words := lacking(await client.devices()):
        if time.monotonic() > deadline:
            raise DeadlineExceeded(f"{words} after {_DEVICES_S:g} s")
        await asyncio.sleep(poll_s)


async def read_metrics(url: str) -> str:
    """Return the metrics of a service."""
    async with httpx.AsyncClient(trust_env=False) as http:
        return (await http.get(f"{url}/metrics", timeout=_METRICS_S)).text


def check_fleet(profile: Profile, ends: Sequence[int] = ()) -> None:
    """True if all schemes can run on a profile, and with `ends` of its end devices.

    Raises:
        InvalidInput: an upper tier has no node, or it has fewer end devices.
    """
    for tier in (Tier.EDGE, Tier.CLOUD):
        if not profile.nodes.of(tier):
            raise InvalidInput(f"this experiment needs nodes of every tier, and nodes.{tier} of the profile is 0")
    most = profile.nodes.end
    for number in ends:
        if not 1 <= number <= most:
            raise InvalidInput(
                f"the profile has {most} end devices (nodes.end), so a point is for 1 to {most}, not for {number}"
            )


def _with_tail(
    answers: Answers, encoder: EncoderEntry, network: ModelEntry, form: FeatureForm, images: Array
) -> Answers:
    """Add the tail's answers to the features of `images`, in the form in which these arrive over the network."""

    def load(side: Side) -> Callable[[], OnnxModel]:
        return partial(load_encoder, encoder, network, side, threads=_THREADS)

    head, tail = HeadModel(encoder, network, load("head")), TailModel(encoder, network, load("tail"), ())
    for start in range(0, len(images), _TAIL_IMAGES):
        features = head.run({"images": images[start : start + _TAIL_IMAGES]}, [form])[form]
        answers = answers.joined(Answers.compute(tail, features, batch=BATCH))
    return answers


def head_ms_per_image(encoder: EncoderEntry, form: FeatureForm) -> float:
    """Milliseconds per image of an encoder's head on one core of this machine, packing included."""
    load = partial(load_encoder, encoder, load_manifest().entry(encoder.network), "head")
    return _real_ms(
        HeadModel(encoder, load_manifest().entry(encoder.network), load), read_sample().images[:BATCH], form
    )


def _real_ms(model: Model, batch: Array, output: str = "logits") -> float:
    """Milliseconds per image: the smallest of a few runs, since the others have other programs' time in them."""
    best_s = math.inf
    for _ in range(_SPEED_RUNS):
        began = time.perf_counter()
        model.run({"images": batch}, [output])
        best_s = min(best_s, time.perf_counter() - began)
    return best_s * 1000 / len(batch)


def plan_fleet(
    profile: Profile,
    networks: Sequence[Network],
    folder: Path,
    scheduler: Mapping[str, Any] | None = None,
    nodes: Mapping[str, Mapping[str, Any]] | None = None,
) -> FleetPlan:
    """The services of a profile; their links files are written into `folder`.

    Args:
        folder: must be empty; the scheduler's database goes there as well.
        scheduler: settings of the scheduler in addition to the profile's. It trusts all tiers, and knows the latencies
            of the profile for the paper's formulas.
        nodes: settings of single nodes in addition to the profile's, by name.
    """
    settings = {
        "port": "0",
        "state": str(folder / "state"),
        "trusted": ",".join(Tier),
        "end_link_s": f"{profile.round_trip_s('scheduler-end'):g}",
        "edge_link_s": f"{profile.round_trip_s('end-edge'):g}",
        "cloud_link_s": f"{profile.round_trip_s('end-cloud'):g}",
        **{name: str(value) for name, value in (scheduler or {}).items()},
        **_links(profile, SCHEDULER, folder, 0),
    }
    services = [ServicePlan(name=SCHEDULER, kind=SCHEDULER, settings=settings)]
    for network in networks:
        for number in range(1, profile.nodes.of(network.tier) + 1):
            node = {
                "host": address_of(network.tier, number),
                "model": network.name,
                **_links(profile, network.tier, folder, number),
            }
            if network.emulated_ms_per_image is not None:
                node["emulate_ms_per_image"] = f"{network.emulated_ms_per_image:g}"
            if network.answers is not None:
                node["emulate_answers"] = str(network.answers)
            name = f"{network.tier}-{number}"
            node |= {key: str(value) for key, value in (nodes or {}).get(name, {}).items()}
            services.append(ServicePlan(name=name, kind=network.tier, settings=node))
    return FleetPlan(services=tuple(services))


def _links(profile: Profile, asks: str, folder: Path, number: int) -> dict[str, str]:
    path = folder / f"links-{asks}-{number}.toml"
    return {"links": str(path)} if write_links(profile, asks, path, number=number) else {}
