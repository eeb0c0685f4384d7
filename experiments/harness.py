"""The common parts of all experiments: a run that collects points, its folder, its record, and the tables and plots.

An experiment measures points (`Run.add`), one dictionary each: the conditions, and the figures. Pure functions of the
experiment make tables and plots only from the record, so they can be made again at any time. A run folder holds

    record.json    the points, how they came about, and the rows derived from them
    table.md       the rows
    *.png, *.svg   the plots
    services.log   what the services wrote

A run that is stopped keeps what it has measured. A run in which a service died unexpectedly, or without any usable
point, is marked invalid.
"""

from __future__ import annotations

import asyncio
import shlex
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing, contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any, Literal, Self, cast

from pydantic import BaseModel, ConfigDict, Field

from experiments.cost import ServedImages
from experiments.emulation import EMULATED
from experiments.plots import Figures, counted
from experiments.profile import Profile
from experiments.record import RunRecord, origin, read_record
from experiments.testbed import (
    Encoding,
    Network,
    measure_networks,
    plan_fleet,
    read_tasks,
    with_answers,
)
from models.data import ImageSet
from tierkit.atomic import write_atomically
from tierkit.client import AsyncClient
from tierkit.errors import InvalidInput, MissingExtra, ServiceFailed, SetupError, TerraceError
from tierkit.fleet import Exit, Fleet, FleetPlan, LaunchOptions, launch
from tierkit.types import Tier

__all__ = [
    "MOST_RUNS",
    "MOST_TASKS",
    "RECORD",
    "SPREAD_HEADINGS",
    "Experiment",
    "Log",
    "Options",
    "Outcome",
    "Point",
    "Record",
    "Request",
    "Run",
    "Table",
    "cell",
    "circumstances",
    "execute",
    "extent",
    "grouped",
    "new_folder",
    "option",
    "present",
    "publish",
    "reason",
    "spread_row",
]

RECORD = "record.json"
_LOG = "services.log"

TASKS, QUICK_TASKS = 200, 40
"""The CIFAR-100 test set in tasks of 50, and a fifth of it."""

MOST_TASKS = 10_000
"""Most tasks of a run."""
MOST_RUNS = 1_000
"""Most runs of each point."""

_START_S = 60.0
_JOIN_S = 30.0

Record = Mapping[str, Any]
Point = Mapping[str, Any]


SPREAD_HEADINGS = " | median | range | n"


def spread_row(words: str, spread: Mapping[str, Any], form: str) -> list[str]:
    """A figure under `SPREAD_HEADINGS`.

    Args:
        spread: `experiments.record.Spread` as a dict.
        form: how a value of it is written, such as ".2f".
    """
    least, most = format(spread["minimum"], form), format(spread["maximum"], form)
    return [words, format(spread["median"], form), f"{least} to {most}", str(spread["n"])]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows as text. Markdown and the terminal show them."""

    headings: str
    """Headings with ` | ` between them, the form of Markdown."""
    rows: Sequence[Sequence[str]]
    spare: Sequence[str] = ()
    """Headings of the columns that a narrow terminal can do without, the first to go first; after them go the last."""

    @property
    def columns(self) -> list[str]:
        """The headings one by one."""
        return self.headings.split(" | ")

    def markdown(self) -> str:
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        return "\n".join(f"| {' | '.join(_escaped(text) for text in line)} |" for line in lines) + "\n"


def _escaped(text: str) -> str:
    """Text that ends neither its cell nor its line of a Markdown table."""
    return " ".join(text.replace("|", "\\|").splitlines())


def cell(value: float | None, form: str) -> str:
    """A figure in a cell."""
    return "-" if value is None else format(value, form)


def grouped(points: Iterable[Point], *fields: str) -> dict[tuple[Any, ...], list[Point]]:
    """Points grouped by the values of these fields; groups are in the order of their first points."""
    groups: dict[tuple[Any, ...], list[Point]] = {}
    for point in points:
        groups.setdefault(tuple(point[field] for field in fields), []).append(point)
    return groups


def option(default: Any, help_text: str, *, quick: Any = None, **facts: Any) -> Any:
    """A field of `Options`.

    Args:
        default: None if the experiment chooses.
        help_text: text of `--help`; if there are two defaults, they are added.
        quick: default of a quick run, if it differs.
        facts: further arguments of `typer.Option`: `min`, `max`, `metavar` and others.
    """
    if quick is not None:
        help_text = f"{help_text} Default: {_in_words(default)}; {_in_words(quick)} with --quick."
        facts["quick"] = quick
    return Field(default, description=help_text, json_schema_extra=facts)


def _in_words(default: Any) -> str:
    if isinstance(default, list):
        return ", ".join(map(_in_words, default))
    return f"{default:,}" if isinstance(default, int) else f"{default:g}"


class Options(BaseModel):
    """Choices of an experiment in addition to its `Request`. Each field is an option of its command."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def settled(self, *, quick: bool) -> Self:
        """Return the choices, with the defaults of a quick run for unset ones if it is one."""
        facts = {
            name: cast(dict[str, Any], about.json_schema_extra or {}) for name, about in type(self).model_fields.items()
        }
        left = facts.keys() - self.model_fields_set if quick else ()
        return self.model_copy(update={name: facts[name]["quick"] for name in left if "quick" in facts[name]})


class Experiment(ABC):
    """One experiment: how it is measured, and what is made of its record. The docstring of a subclass says in a line
    what it shows."""

    name: str
    options: type[Options] = Options
    """Further choices of this experiment."""
    ignores: frozenset[str] = frozenset()
    """Fields of `Request` that it ignores: quick, seed, tasks or data."""
    profile: Literal["paper", "native"] | None = "paper"
    """Default profile; `native` is this machine without emulation. None if machines have no part in it."""
    repeats: tuple[str, str] = ("runs", "runs")
    """The field of a row that counts what its figures were made of, and what that is; a row without it counts one."""
    quick: str = ""
    """Description of a quick run: a template over the configuration and `share`, its part of the test set. Empty if
    quick and whole runs are the same.
    """
    one_row: bool = False
    """True if there is a single row, which `--json` then prints bare."""

    @property
    def summary(self) -> str:
        """Its subject, as part of a sentence."""
        said = " ".join((self.__doc__ or "").split()).rstrip(".")
        return said[:1].lower() + said[1:]

    @abstractmethod
    async def measure(self, run: Run, chosen: Any) -> None:
        """Add the points of a run; `chosen` are its `options`."""

    @abstractmethod
    def rows(self, record: Record) -> list[dict[str, Any]]:
        """The results, from points and configuration: what `--json` prints. A row that misses targets names them in
        `missed`, and the command ends with 1."""

    @abstractmethod
    def table(self, record: Record) -> Table:
        """The rows in words."""

    def served(self, record: Record) -> list[ServedImages]:
        """Images that the fleets of a record answered, if their cost can be calculated."""
        return []

    def draw(self, record: Record, figures: Figures) -> None:  # noqa: B027 - most experiments have plots, some none
        """The plots, if there are any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Request of the user."""

    profile_name: str
    profile: Profile
    quick: bool = False
    seed: int = 0
    tasks: int | None = None
    """Number of tasks of 50 images, at most `MOST_TASKS`; None for the whole test set, or a fifth of it in a quick
    run.
    """
    data: Path | None = None


class Log:
    """File of the services' output, line by line. If the disk is full, later lines are lost, but the run continues."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8", errors="backslashreplace")
        self._path = path
        self._empty = True
        self.lost = ""
        """Why the rest is not there."""

    def write(self, line: str) -> None:
        self._empty = False
        if not self.lost:
            with self._losing():
                self._file.write(line)

    def close(self) -> None:
        with self._losing():
            self._file.close()

    @contextmanager
    def _losing(self) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            self.lost = exc.strerror or str(exc)

    def drop_empty(self) -> None:
        """Leave no folder of a run that no service had a part in."""
        if self._empty:
            self._path.unlink()
            self._path.parent.rmdir()


Tell = Callable[[str, int, int], None]
"""Called with what is being done, and how many steps of how many are done."""


@dataclass(kw_only=True)
class Run:
    """One run of an experiment, as its `measure` sees it."""

    request: Request
    folder: Path
    """Folder for temporary files of the run."""
    tell: Tell
    log: Log
    config: dict[str, Any] = field(default_factory=dict)
    """Whatever else decides about the figures; goes into the record."""
    points: list[Point] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    invalid: str = ""
    """Why the figures cannot be trusted."""
    _steps: int = 0
    _done: int = 0
    _fleets: int = 0
    _images: ImageSet | None = None

    @property
    def profile(self) -> Profile:
        return self.request.profile

    @property
    def tasks(self) -> int:
        return self.request.tasks or (QUICK_TASKS if self.request.quick else TASKS)

    @property
    def images(self) -> ImageSet:
        """The images of all tasks."""
        if self._images is None:
            self._images, said = read_tasks(self.tasks, self.request.data)
            self.note(said)
        return self._images

    def takes(self, tasks: int) -> None:
        """Use at most the images of this many tasks. To be called before any of them is read."""
        self.request = replace(self.request, tasks=tasks)

    def note(self, text: str) -> None:
        """Say something once that every reader of the figures must know."""
        if text not in self.notes:
            self.notes.append(text)

    def note_limits(self) -> None:
        """Note the effects that computed times leave out next to measured ones, if the profile limits a bandwidth."""
        if limits := self.profile.limits:
            self.note(
                "formulas, bounds and simulations know the latency of the links alone; what bytes take over links of a "
                f"limited bandwidth ({limits}) is in the measured times only"
            )

    def add(self, **point: Any) -> None:
        """Keep what was measured."""
        self.points.append(point)

    def expect(self, steps: int) -> None:
        """Add to the number of steps that are still to come."""
        self._steps += steps

    @contextmanager
    def step(self, label: str) -> Iterator[None]:
        """A part of the work, as the progress shows it."""
        self.tell(label, self._done, max(self._steps, self._done + 1))
        yield
        self._done += 1

    async def networks(
        self, profile: Profile, names: Mapping[Tier, str] | None = None, encoding: Encoding | None = None
    ) -> list[Network]:
        """Prepare the networks of a fleet; the record names the source of their answers.

        Args:
            names: names of networks that replace a tier's first one.
            encoding: form in which images will also go to upstream nodes.
        """
        with self.step("reading the networks"):
            measured = await asyncio.to_thread(measure_networks, profile, names)
        self.expect(1 + sum(network.emulated_ms_per_image is not None for network in measured))
        prepared = []
        for network in measured:
            if network.emulated_ms_per_image is not None:
                with self.step(f"answers of {network.name}, computed beforehand"):
                    images = await asyncio.to_thread(lambda: self.images.images)
                    network = await asyncio.to_thread(with_answers, network, images, self.folder, encoding)
            self.note(str(network))
            prepared.append(network)
        return prepared

    @asynccontextmanager
    async def fleet(
        self,
        profile: Profile,
        networks: Sequence[Network],
        scheduler: Mapping[str, Any] | None = None,
        nodes: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        expects_exits: bool = False,
        watch: Callable[[str, str], None] = lambda name, line: None,
    ) -> AsyncIterator[tuple[Fleet, AsyncClient]]:
        """Run a fleet of this profile, with all nodes in the device list.

        Args:
            scheduler, nodes: settings in addition to the profile's; see `plan_fleet`.
            expects_exits, watch: see `launched`.

        Raises:
            ServiceFailed: a service ended meanwhile; the run is invalid.
        """
        self._fleets += 1
        folder = self.folder / f"fleet-{self._fleets}"
        folder.mkdir()
        plan = plan_fleet(profile, networks, folder, scheduler, nodes)
        async with (
            self.launched(plan, folder, expects_exits=expects_exits, watch=watch) as fleet,
            AsyncClient(fleet.scheduler_url, timeout_s=_START_S) as client,
        ):
            yield fleet, client

    @asynccontextmanager
    async def launched(
        self,
        plan: FleetPlan,
        folder: Path,
        *,
        expects_exits: bool = False,
        watch: Callable[[str, str], None] = lambda name, line: None,
        command: Sequence[str] = EMULATED,
    ) -> AsyncIterator[Fleet]:
        """Run a fleet with a given plan. See `fleet`.

        Args:
            command: starts a service; the users' command if nothing is emulated.
            expects_exits: True if the experiment ends services itself, so that an end is not an error.
            watch: called with the name of a service and a line that it wrote.
        """
        body = asyncio.current_task()
        assert body is not None

        def on_exit(end: Exit) -> None:
            if not expects_exits and not self.invalid:
                self.invalid = f"{end} during the measurement{circumstances(end, datetime.now(UTC))}"
                body.cancel()

        def on_line(name: str, line: str) -> None:
            self.log.write(f"{name}  {line}\n")
            watch(name, line)

        starting = launch(
            plan, folder, LaunchOptions(on_line=on_line, on_exit=on_exit, start_s=_START_S, command=command)
        )
        self.expect(1)
        try:
            async with AsyncExitStack() as stack:
                with self.step("starting the fleet"):
                    fleet = await stack.enter_async_context(starting)
                    await fleet.join(budget_s=_JOIN_S)
                yield fleet
        except asyncio.CancelledError:
            if self.invalid and body.uncancel() == 0:
                raise ServiceFailed(self.invalid) from None
            raise


def circumstances(end: Exit, when: datetime) -> str:
    """Describe the end of a service: the time, and its last line unless a signal killed it."""
    said = f"; it said: {end.last_lines[-1]}" if end.code > 0 and end.last_lines else ""
    return f", at {when:%H:%M:%S} UTC{said}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of a run."""

    folder: Path
    record: Record
    table: Table
    source: str
    """Source of the figures, and the number of measurements behind each."""
    figures: Figures | None
    """None where matplotlib is not installed."""
    warnings: Sequence[str] = ()


async def execute(
    experiment: Experiment, request: Request, out: Path, tell: Tell, options: Options | None = None
) -> Outcome:
    """Measure, write the record, and make tables and plots from it. Cancellation ends only the measurement, in good
    order.

    Args:
        options: choices of the user; None for the defaults.
        out: folder for the run; if it exists it is kept, and the run gets a new folder next to it.

    Raises:
        TerraceError: nothing could be measured, although no service died; or `SetupError`: there is no place for the
            run's folder.
    """
    folder = new_folder(out)
    state = "complete"
    with (
        TemporaryDirectory(prefix="terrace-experiment-", ignore_cleanup_errors=True) as scratch,
        closing(Log(folder / _LOG)) as log,
    ):
        run = Run(request=request, folder=Path(scratch), tell=tell, log=log)
        if experiment.profile == "paper":
            run.note(f"profile {request.profile_name}: {request.profile}")
        try:
            await experiment.measure(run, (options or experiment.options()).settled(quick=request.quick))
        except asyncio.CancelledError:
            state = "interrupted"
            run.note("stopped before its end; what was measured until then is here")
            current = asyncio.current_task()
            assert current is not None
            current.uncancel()
        except (TerraceError, OSError, ExceptionGroup) as exc:
            cause = _cause(exc)
            if not run.points and not isinstance(cause, ServiceFailed):
                log.drop_empty()
                raise
            if not isinstance(cause, TerraceError | OSError):
                raise cause from exc
            state = "invalid"
            run.note(str(cause))
    if log.lost:
        run.note(f"{_LOG} is not whole: {log.lost}")
    config = {
        "profile": {"name": request.profile_name, **request.profile.model_dump(mode="json")},
        "quick": request.quick,
        "tasks": run.tasks,
        **run.config,
    }
    fields: dict[str, Any] = {"config": config, "points": run.points, "notes": run.notes, "state": state}
    rows: list[dict[str, Any]] = []
    try:
        rows = experiment.rows(fields)
        if state == "complete" and not any(_counts(experiment, rows)):
            fields["state"] = "invalid"
            run.note("every run was left out, so that there are no figures; the notes before this one say why")
    finally:  # should the analysis fail, what was measured is not lost
        results = {"rows": rows}
        record = RunRecord(experiment=experiment.name, samples={}, results=results, seed=request.seed, **fields)
        _keep(record, folder)
    try:
        return publish(experiment, folder, plots=state != "interrupted")  # who has stopped it waits for no plots
    except SetupError as exc:
        again = f"`terrace experiment report {shlex.quote(str(folder))}` makes table and plots of it"
        raise SetupError(f"{exc}; {folder / RECORD} is whole, and {again}") from exc.__cause__


def _keep(record: RunRecord, folder: Path) -> None:
    """Write the record into its folder, or elsewhere if that has no room, so that a long run is not lost.

    Raises:
        SetupError: it is not in its folder; the message names the place.
    """
    try:
        record.write(folder, stem=Path(RECORD).stem)
    except SetupError as exc:
        try:
            kept = record.write(Path(mkdtemp(prefix="terrace-record-")), stem=Path(RECORD).stem)
        except (SetupError, OSError) as other:
            raise SetupError(f"{exc}; what was measured is lost") from other
        raise SetupError(f"{exc}; the record is {kept}") from exc.__cause__


def _cause(error: Exception) -> Exception:
    """Return the error that ended a run, unpacked from its exception groups."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


def present(experiment: Experiment, path: Path, *, plots: bool = True) -> Outcome:
    """Make table and plots only from a record.

    Args:
        plots: True to draw them, which takes seconds.

    Raises:
        SetupError: the record cannot be read, or is damaged.
    """
    record = read_record(path)
    figures, warnings = None, []
    try:
        table, source = experiment.table(record), f"Measured by {origin(record)}; {extent(experiment, record)}."
        if plots:
            figures = Figures(record["state"])
            if record["points"]:
                experiment.draw(record, figures)
    except MissingExtra as exc:
        warnings.append(f"no plots: {exc}")
    except (InvalidInput, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as exc:
        raise SetupError(
            f"the record {path} is damaged: its config and points do not fit {experiment.name} ({reason(exc)})"
        ) from exc
    return Outcome(folder=path.parent, record=record, table=table, source=source, figures=figures, warnings=warnings)


def reason(error: Exception) -> str:
    """Why figures cannot be made of config and points, without the words of Python where there are others."""
    if isinstance(error, KeyError):
        return f"{error} is missing"
    return str(error) if type(error) in (InvalidInput, ValueError) else f"{type(error).__name__}: {error}"


def extent(experiment: Experiment, record: Record) -> str:
    """Describe in words the number of measurements behind each figure of a record, and mention a quick run."""
    _, what = experiment.repeats
    numbers = _counts(experiment, experiment.rows(record))
    config, quick = record["config"], ""
    if config["quick"] and experiment.quick:
        share = "a fifth of the test set" if config["tasks"] == QUICK_TASKS else f"{config['tasks']} tasks"
        quick = f"; a quick run: {experiment.quick.format(**config, share=share)}"
    return f"{counted(numbers)} for each row ({what}){quick}"


def _counts(experiment: Experiment, rows: Sequence[Mapping[str, Any]]) -> list[int]:
    """Numbers of measurements behind the figures of these rows."""
    field, _ = experiment.repeats
    numbers: list[int] = []
    for row in rows:
        count = row.get(field, 1)
        numbers += count.values() if isinstance(count, Mapping) else [count]
    return numbers


def publish(experiment: Experiment, folder: Path, *, plots: bool = True) -> Outcome:
    """Write table and plots into a run folder, made only from its record."""
    shown = present(experiment, folder / RECORD, plots=plots)
    record = shown.record
    notes = [f"- {note}" for note in record["notes"]]
    heading = f"# {experiment.name}: {experiment.summary}"
    state = "" if record["state"] == "complete" else f"**This run is {record['state']}.**\n\n"
    parts = [heading, state + shown.table.markdown(), "\n".join(notes), shown.source]
    text = "\n\n".join(part.strip() for part in parts if part) + "\n"
    write_atomically(folder / "table.md", text.encode(errors="backslashreplace"))
    if shown.figures is not None:
        shown.figures.save(folder)
    return shown


def new_folder(wanted: Path) -> Path:
    """Make a new folder: the wanted one, or another one next to it.

    Raises:
        SetupError: no folder can be made there.
    """
    if wanted.name in ("", ".."):  # only what it stands for has a name that a number can follow
        wanted = wanted.resolve()
        if not wanted.name:
            raise SetupError(f"{wanted} cannot hold a run, and no folder can be made next to it: name another")
    folder, number = wanted, 1
    while True:
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            pass
        except OSError as exc:
            raise SetupError(f"cannot make the folder {folder}: {exc.strerror}") from exc
        else:
            return folder
        number += 1
        folder = wanted.with_name(f"{wanted.name}-{number}")
