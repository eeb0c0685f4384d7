"""`terrace train improve`: a better network from a release and the pictures that devices have kept."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from terrace.commands.releases import TrialOptions
from terrace.commands.token import span
from terrace.commands.training import say
from terrace.console import percent, print_json, screen
from terrace.options import DEFAULT_URL, Credentials, Data, Json, Scheduler, check_tls_ca, with_options
from tierkit.client import Client
from tierkit.errors import InvalidInput, NotFound, SetupError
from tierkit.extras import training_extra
from tierkit.plaintext import one_line
from tierkit.wire.releases import ReleaseState

__all__ = ["improve"]

_LONGEST_S = 30 * 24 * 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class ImproveOptions:
    """Options of `terrace train improve` for what is trained."""

    release: Annotated[
        str, typer.Option(metavar="NAME@NUMBER", help="The release in force, from which training starts.")
    ]
    folder: Annotated[
        Path,
        typer.Option(
            metavar="DIRECTORY",
            help="Folder that keeps the improvement; the same command continues after an interruption.",
            file_okay=False,
        ),
    ]
    tier: Annotated[str, typer.Option(help="Tier whose network is improved: end.")] = "end"
    rounds: Annotated[
        int, typer.Option(min=1, max=10_000, help="Number of rounds; each combines the devices' changes.")
    ] = 20
    layers: Annotated[int, typer.Option(min=0, max=10_000, help="Number of last layers to train; 0 for all.")] = 0
    devices: Annotated[
        int, typer.Option(min=1, max=10_000, help="Number of expected workers; each sends one change per round.")
    ] = 3
    rate: Annotated[float, typer.Option(min=1e-6, max=10, help="Learning rate of the workers' steps.")] = 0.01
    batch_size: Annotated[int, typer.Option(min=1, max=4_096, help="Pictures of a step.")] = 32
    least_confidence: Annotated[
        float, typer.Option(min=0, max=1, help="Least confidence of an answer from above that is learned.")
    ] = 0.7
    mirror: Annotated[
        bool,
        typer.Option(
            "--mirror/--no-mirror",
            help="Learn mirror images too. Leave them out if the mirror image of a class looks like another class.",
        ),
    ] = True
    strategy: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="How changes become weights: a strategy of terrace train host, or a TOML file. Default: the trimmed "
            "mean of few steps without momentum.",
        ),
    ] = None

    json: Json = False

    def wish(self) -> Any:
        """Return what `Improving` takes."""
        from terrace.improve_state import ImproveWish
        from training.improve.plan import check_strategy
        from training.strategies.finding import find_hosted

        given: dict[str, Any] = {}
        if self.strategy is not None:
            try:
                given = {"choice": Path(self.strategy).stem, "strategy": find_hosted(self.strategy)}
                check_strategy(given["strategy"])
            except (InvalidInput, SetupError) as error:
                raise typer.BadParameter(str(error), param_hint="--strategy") from error
        names = ("release", "tier", "rounds", "layers", "devices", "rate", "least_confidence", "mirror")
        return ImproveWish(batch=self.batch_size, **{name: getattr(self, name) for name in names}, **given)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement(TrialOptions):
    """Options of `terrace train improve` for the comparison of the networks, and for the host of the run."""

    validation: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Labelled pictures to compare the networks on: a folder with a folder for each class, cifar100 or "
            "mnist (their test images). A release with tuned thresholds needs them.",
        ),
    ] = None
    data: Data = None
    if_agreement_below: Annotated[
        float | None,
        typer.Option(
            min=0, max=1, metavar="SHARE", help="Do nothing unless the audited agreement of the fleet is below this."
        ),
    ] = None
    no_release: Annotated[bool, typer.Option("--no-release", help="Stop after writing the improved model set.")] = False
    within: Annotated[
        str, typer.Option(metavar="SPAN", help="Time for the training; then the command ends, and can continue.")
    ] = "1d"
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address at which the host of the run listens; port 0 for any.")
    ] = "127.0.0.1:0"
    advertise_url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="URL at which devices reach the host. Default: the address of --listen."),
    ] = None

    def host(self, scheduler: str, credentials: Credentials) -> dict[str, object]:
        """Return the settings of the host."""
        name, colon, port = self.listen.rpartition(":")
        if not colon or not name or not port.isdecimal() or int(port) > 65_535:
            raise typer.BadParameter(f"an address such as 0.0.0.0:8074, not {self.listen!r}", param_hint="--listen")
        return {
            "host": name.strip("[]"),
            "port": int(port),
            "scheduler": scheduler,
            "token_file": credentials.token_file,
            "tls_ca": credentials.tls_ca,
            "advertise_url": self.advertise_url,
        }


@with_options
def improve(
    context: typer.Context,
    improvement: ImproveOptions,
    judgement: Judgement,
    scheduler: Scheduler = DEFAULT_URL,
    *,
    credentials: Credentials,
) -> None:
    """Improve a release with pictures that devices have kept: train, compare, make a release and start its trial."""
    check_tls_ca(context, scheduler)
    with training_extra("training on the fleet", "learn"):
        import torch  # noqa: F401
    from terrace.improving import STATE, Goal, Improving

    try:
        within_s = span(judgement.within, longest_s=_LONGEST_S).total_seconds()
    except typer.BadParameter as error:
        raise typer.BadParameter(error.message, param_hint="--within") from error
    wish = improvement.wish()
    with credentials.connect(scheduler) as client:
        least = judgement.if_agreement_below
        if least is not None and not (improvement.folder / STATE).exists() and (why := _no_need(client, least)):
            screen().print(why, soft_wrap=True, markup=False)
            return
        goal = Goal(
            validation=judgement.validation,
            data=judgement.data,
            release=not judgement.no_release,
            trial=judgement.fields(),
            host=judgement.host(scheduler, credentials),
            within_s=within_s,
            say=say,
            told=lambda outcome: _tell(client, outcome),
        )
        outcome = Improving(client, improvement.folder, wish, goal).run()
        now = "" if outcome.new_release is None else _now(client, outcome.new_release)
    if improvement.json:
        print_json(outcome.model_dump(mode="json"))
    else:
        screen().print(one_line(_said(outcome, improvement.folder, now)), soft_wrap=True, markup=False)
    if outcome.state == "refused":
        raise typer.Exit(1)


def _tell(client: Client, state: Any) -> None:
    """Let the page show how far an improvement is."""
    client.put_improvement(state.told())


def _no_need(client: Client, least: float) -> str:
    """Reason why the fleet needs no improvement; "" if it needs one."""
    now = client.learning()
    if now.agreement is None:
        return "nothing to do: no sure pictures were audited; set audit_share in the table [learn] of devices"
    if now.agreement >= least:
        return f"nothing to do: the tiers agree on {percent(now.agreement)} of {now.audited:,} audited pictures"
    return ""


def _now(client: Client, release: str) -> str:
    """The state of a release in words. The release of an old improvement may have been rolled back."""
    try:
        state = client.release(release).state
    except NotFound:
        return "was made, and has been removed"
    return "is tried now" if state is ReleaseState.CANARY else f"is {state.value} now"


def _said(outcome: Any, folder: Path, now: str) -> str:
    if outcome.state == "refused":
        return f"no release was made: {outcome.reason}"
    if outcome.new_release is None:
        return f"the improved model set is in {folder / 'set'}: {outcome.verdict}"
    return f"{outcome.new_release} {now}: {outcome.reason}"
