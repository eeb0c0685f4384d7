"""The heads and tails of a node: found, fetched from the scheduler if they are missing, loaded when needed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from encryption.features import check_features
from encryption.hiding import hiding_of
from encryption.serving import HeadModel, NetworkPart, TailModel, offer_of
from models.choosing import with_choice
from models.manifest import EncoderEntry, Manifest, ModelEntry, Side
from models.serving import decode_of, key_of, load_models, obtain_weights, open_store
from models.session import OnnxModel, load_encoder
from models.source import chosen_entries
from tierkit.errors import (
    BrokenExtension,
    DeadlineExceeded,
    InvalidInput,
    SetupError,
    Unavailable,
    UpstreamError,
    WeightsError,
)
from tierkit.inference.model import Model
from tierkit.inference.served import NOTHING_LOADED, Guard, Loaded, ModelKey, ReleaseParts, ServedModels
from tierkit.settings import NodeSettings, UpperSettings
from tierkit.types import Tier
from tierkit.wire.messages import EncoderOffer
from tierkit.wire.oip import InferRequest

__all__ = ["Loader", "encoders_of", "load_end", "load_heads", "load_served", "load_upper", "tail_key", "upper_keys"]

log = logging.getLogger(__name__)


async def load_heads(settings: NodeSettings, manifest: Manifest, loaded: Loaded = NOTHING_LOADED) -> list[HeadModel]:
    """The heads of all encoders of the manifest, ready to load, without those that the node has. One whose file is
    neither here nor with the scheduler is left out: the scheduler then sends this node nothing that needs it.

    Raises:
        TerraceError: the node serves meanwhile, and may get the file later.
    """
    store = open_store(settings)
    heads = []
    for encoder in manifest.encoders:
        if offer_of(encoder) in loaded.encoders:
            continue
        try:
            path = await obtain_weights(store, encoder.weights("head"), settings, patient=False, copies=loaded.copies)
        except (SetupError, Unavailable, DeadlineExceeded, UpstreamError) as exc:
            if loaded.serving and not isinstance(exc, WeightsError):
                raise  # a later try may bring it
            log.warning("an encoder is not at hand", extra={"encoder": encoder.name, "why": str(exc)})
            continue
        if not _can_hide(encoder):
            continue
        network = manifest.entry(encoder.network)
        load = _loader(encoder, manifest, "head", path, settings)
        heads.append(HeadModel(encoder, network, load, decode_of(manifest, network)))
    return heads


async def load_end(settings: NodeSettings, manifest: Manifest, loaded: Loaded = NOTHING_LOADED) -> ReleaseParts:
    """Load the networks and heads that an end node serves of a model set, without those that it has.

    Raises:
        SetupError: a network cannot be loaded.
    """
    manifest = await with_choice(settings, Tier.END, manifest, loaded)
    networks = chosen_entries(manifest, settings.model, Tier.END, gpu=settings.provider == "cuda")
    models = await load_models(settings, Tier.END, manifest, loaded)
    heads = await load_heads(settings, manifest, loaded)
    return ReleaseParts(
        models=tuple(map(key_of, networks)),
        encoders=_encoders_in(manifest, loaded, heads),
        served=ServedModels(ready=models),
        heads=heads,
    )


async def load_upper(
    settings: UpperSettings,
    tier: Tier,
    manifest: Manifest,
    loaded: Loaded = NOTHING_LOADED,
    *,
    encodes: bool = False,
) -> ReleaseParts:
    """Load the networks, tails and heads that an upstream node serves of a model set, without those that it has.

    Args:
        encodes: True if it encodes images for other nodes.

    Raises:
        SetupError: a network cannot be loaded.
    """
    manifest = await with_choice(settings, tier, manifest, loaded)
    served = await load_served(settings, tier, manifest, loaded=loaded)
    heads = await load_heads(settings, manifest, loaded) if encodes else []
    new = (model for models in (served.ready, *served.standby.values()) for model in models)
    return ReleaseParts(
        models=upper_keys(settings, tier, manifest, {*loaded.models, *map(ModelKey.of, new)}),
        encoders=_encoders_in(manifest, loaded, heads) if encodes else (),
        served=served,
        heads=heads,
    )


def upper_keys(
    settings: UpperSettings, tier: Tier, manifest: Manifest, loaded: Collection[ModelKey]
) -> tuple[ModelKey, ...]:
    """The networks of a model set that an upstream node serves, and the tails that are among `loaded`."""
    networks = chosen_entries(manifest, settings.model, tier, gpu=settings.provider == "cuda")
    tails = [tail_key(encoder) for encoder in encoders_of(networks, manifest, required=settings.only_features)]
    whole = [] if settings.only_features else map(key_of, networks)
    return (*whole, *(tail for tail in tails if tail in loaded))


def _encoders_in(manifest: Manifest, loaded: Loaded, heads: Sequence[HeadModel]) -> tuple[EncoderOffer, ...]:
    """Encoders of a model set whose heads are loaded now."""
    have = loaded.encoders | {offer_of(head.encoder) for head in heads}
    return tuple(offer for encoder in manifest.encoders if (offer := offer_of(encoder)) in have)


class Loader(Protocol):
    """Source of an upstream node's networks, if another process than the node computes them."""

    async def network(self, entry: ModelEntry) -> Model:
        """A whole network, ready to run."""
        ...

    async def tail(self, encoder: EncoderEntry) -> Callable[[], NetworkPart] | None:
        """Returns a function that loads the tail of an encoder, or None if nothing computes that tail."""
        ...


async def load_served(
    settings: UpperSettings,
    tier: Tier,
    manifest: Manifest,
    loader: Loader | None = None,
    loaded: Loaded = NOTHING_LOADED,
) -> ServedModels:
    """Return the models that an upstream node serves: whole networks, with the tails of their encoders on standby; or
    only the tails.

    Args:
        loader: loads models that another process computes; None: this process computes them.
        loaded: models that the node has already, which are left out.

    Raises:
        SetupError: see `models.serving.load_models`; or only tails are wanted, and there are none.
    """
    if loader is None:
        manifest = await with_choice(settings, tier, manifest, loaded)
    networks = chosen_entries(manifest, settings.model, tier, gpu=settings.provider == "cuda")
    tails: dict[str, list[Model]] = {}
    guards: dict[str, Guard] = {}
    for encoder in encoders_of(networks, manifest, required=settings.only_features):
        if tail_key(encoder) in loaded.models:
            continue
        load: Callable[[], NetworkPart] | None
        if not _can_hide(encoder):
            continue
        if loader is None:
            load = await _local_tail(encoder, manifest, settings, loaded)
        else:
            load = await loader.tail(encoder)
        if load is None:
            log.info("features of an encoder are not taken: nothing computes its tail", extra={"encoder": encoder.name})
            continue
        network = manifest.entry(encoder.network)
        tail = TailModel(encoder, network, load, manifest.labels(network))
        tails.setdefault(encoder.network, []).append(tail)
        guards[tail.name] = partial(_guard, tail)
    if not settings.only_features:
        ready: Sequence[Model]
        if loader is None:
            ready = await load_models(settings, tier, manifest, loaded)
        else:
            ready = [await loader.network(network) for network in networks]
        return ServedModels(ready=ready, standby=tails, guards=guards)
    if not tails and not loaded.models:
        raise SetupError("there are no features to serve: nothing computes the tail of an encoder")
    return ServedModels(ready=[tail for own in tails.values() for tail in own], guards=guards)


def encoders_of(networks: Sequence[ModelEntry], manifest: Manifest, *, required: bool) -> list[EncoderEntry]:
    """The encoders of these networks, network by network.

    Raises:
        SetupError: an encoder is required, and the model set has none for these networks.
    """
    found = [encoder for network in networks for encoder in manifest.encoders if encoder.network == network.name]
    if required and not found:
        names = " ".join(network.name for network in networks)
        raise SetupError(
            f"the model set has no encoder for {names}, so there are no features to serve: 'terrace models cut-encoder "
            f"{names} --models SET --out SET' makes one"
        )
    return found


def tail_key(encoder: EncoderEntry) -> ModelKey:
    """Identity of the tail of an encoder as a node serves it."""
    return ModelKey(encoder.name, encoder.tail.sha256)


def _can_hide(encoder: EncoderEntry) -> bool:
    """True if the hiding of an encoder is installed here. Without it, the node neither sends nor takes its features."""
    try:
        hiding_of(encoder)
    except (InvalidInput, BrokenExtension) as exc:
        log.warning("an encoder is not at hand", extra={"encoder": encoder.name, "why": str(exc)})
        return False
    return True


async def _local_tail(
    encoder: EncoderEntry, manifest: Manifest, settings: NodeSettings, loaded: Loaded
) -> Callable[[], NetworkPart]:
    store, tail = open_store(settings), encoder.weights("tail")
    path = await obtain_weights(store, tail, settings, patient=not loaded.serving, copies=loaded.copies)
    return _loader(encoder, manifest, "tail", path, settings)


async def _guard(tail: TailModel, request: InferRequest) -> None:
    await check_features(tail.encoder, request)
    if not tail.loaded:
        await asyncio.to_thread(tail.load)


def _loader(
    encoder: EncoderEntry, manifest: Manifest, side: Side, path: Path, settings: NodeSettings
) -> partial[OnnxModel]:
    network = manifest.entry(encoder.network)
    return partial(
        load_encoder,
        encoder,
        network,
        side,
        path.parent,
        provider=settings.provider,
        threads=settings.cores,
        labels=manifest.labels(network),
    )
