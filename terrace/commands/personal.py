"""`terrace train work --personal`: a device trains its own head for the network that it serves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import typer

from terrace.console import print_json, screen
from terrace.stoppable import run_stoppable
from tierkit.errors import InvalidAnswer, SetupError
from tierkit.plaintext import one_line
from tierkit.settings import NodeSettings
from tierkit.types import Tier

__all__ = ["train_head"]


def train_head(settings: NodeSettings, kept: Path, stand_back: Callable[[], None], *, json: bool) -> None:
    """Fetch the end network of the release in force, train a head for it, and say if the head is used.

    Args:
        settings: say where the scheduler is, and where fetched networks are kept.
        kept: folder of the kept sample.
        stand_back: called before each step; returns when it may be computed.

    Raises:
        typer.Exit: the head is not better, so it was not written.
        TerraceError: see `training.improve.personal.make_head`; or the scheduler gives no network.
    """
    # They need torch and aiohttp, which other commands do without.
    from models.source import chosen_entries, fetch_from, given_now
    from models.store import ModelStore
    from training.improve.personal import ServedNetwork, make_head

    async def fetched() -> ServedNetwork:
        manifest, told = await given_now(settings)
        if told is None:
            raise InvalidAnswer("the scheduler does not name its release in force: upgrade it")
        (entry,) = chosen_entries(manifest, (), Tier.END)
        path = await ModelStore([], settings.cache).obtain(entry, fetch_from(settings))
        return ServedNetwork(manifest=manifest, entry=entry, content=_read(path), release=told.numbers[0])

    served = run_stoppable(fetched)
    if served is None:
        raise typer.Abort
    outcome = make_head(served, kept, stand_back)
    if json:
        print_json({"passes": outcome.passes, "reason": outcome.reason, **outcome.record.model_dump(mode="json")})
    elif outcome.passes:
        said = (
            f"a personal head for the network of release {served.release} is in {kept / 'personal'}: {outcome.reason}"
        )
        screen().print(one_line(said), soft_wrap=True, markup=False)
    else:
        screen().print(one_line(f"no personal head was written: {outcome.reason}"), soft_wrap=True, markup=False)
    if not outcome.passes:
        raise typer.Exit(1)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SetupError(f"cannot read the network {path}: {error.strerror}") from error
