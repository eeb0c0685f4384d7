"""Run records: what was measured, with all that is needed to measure it again.

Tables and plots are made from records alone. A record is written once, whole (temporary file, then rename), so a run
that is cut off leaves either a complete record or none.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from models.atomic import write_atomically
from tierkit.errors import InvalidInput, SetupError

__all__ = [
    "LARGEST",
    "LARGEST_SEED",
    "SEED",
    "RunRecord",
    "Spread",
    "host_facts",
    "joined",
    "made_folder",
    "origin",
    "outside",
    "read_record",
    "record_stem",
    "source_commit",
    "spread",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """n, median, mean, minimum and maximum of samples, in the unit of the samples."""

    n: int
    median: float
    mean: float
    minimum: float
    maximum: float


def spread(samples: Sequence[float]) -> Spread:
    """Summarise `samples` (at least one)."""
    return Spread(
        n=len(samples),
        median=statistics.median(samples),
        mean=statistics.fmean(samples),
        minimum=min(samples),
        maximum=max(samples),
    )


def host_facts() -> dict[str, str | int | None]:
    """The machine, how busy it is (1, 5 and 15 minutes), this process's claim on it, and the versions that a figure
    depends on."""
    facts: dict[str, str | int | None] = {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "priority": _priority(),
        "load_average": " ".join(f"{load:.2f}" for load in os.getloadavg()),
    }
    for package in ("terrace", "onnxruntime", "onnxruntime-gpu", "numpy", "fastapi", "uvicorn", "aiohttp", "httpx"):
        try:
            facts[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            facts[package] = None
    return facts


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _priority() -> str:
    """How the system's scheduler treats this process and those that it starts."""
    if sys.platform == "linux" and os.sched_getscheduler(0) in {os.SCHED_FIFO, os.SCHED_RR}:
        return f"real-time {os.sched_getparam(0).sched_priority}"
    return f"nice {os.getpriority(os.PRIO_PROCESS, 0)}"


def source_commit(folder: Path | None = None) -> str | None:
    """Commit of the checkout that holds `folder`, with "+changes" when the tree differs from it; None outside git."""
    where = folder or Path(__file__).parent

    def git(*args: str) -> str:
        done = subprocess.run(["git", "-C", str(where), *args], capture_output=True, text=True, check=True, timeout=10)
        return done.stdout.strip()

    try:
        dirty = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + ("+changes" if dirty else "")
    except (OSError, subprocess.SubprocessError):
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """One measurement.

    `samples` holds every raw figure by name (the unit is the suffix of the name), `results` what was derived from them.
    """

    experiment: str
    config: Mapping[str, Any]
    samples: Mapping[str, Sequence[float]]
    results: Mapping[str, Any]
    points: Sequence[Mapping[str, Any]] = ()
    """Raw figures that belong together, one run each: its conditions, and what was measured under them."""
    state: str = "complete"
    """complete | interrupted (what was measured until then is here) | invalid (`notes` say why)"""
    notes: Sequence[str] = ()
    """What a reader of the figures must know."""
    seed: int | None = None
    command: Sequence[str] = field(default_factory=lambda: [Path(sys.argv[0]).name, *sys.argv[1:]])
    commit: str | None = field(default_factory=source_commit)
    host: Mapping[str, Any] = field(default_factory=host_facts)
    measured_at: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    def write(self, folder: Path, *, stem: str | None = None) -> Path:
        """Write the record into `folder` and return its path; an existing record is never overwritten.

        Args:
            stem: of the file's name. Default: the experiment and the time.

        Raises:
            SetupError: it cannot be written; nothing is left of it.
        """
        text = _as_json(asdict(self))  # first: what JSON cannot hold must leave no file behind
        made_folder(folder)
        stem = stem or record_stem({"experiment": self.experiment, "measured_at": self.measured_at})
        path = folder / f"{stem}.json"
        number = 1
        while path.exists():
            number += 1
            path = folder / f"{stem}-{number}.json"
        write_atomically(path, text.encode())
        return path


_INNERMOST = re.compile(r"[\[{]\n[^\[\]{}]*[\]}]")
"""A list or table of plain values in indented JSON. No text of JSON holds a line break."""


def _as_json(fields: Mapping[str, Any]) -> str:
    """Indented, but for lists and tables of plain values, of which each has one line."""
    text = json.dumps(fields, indent=1)
    return _INNERMOST.sub(lambda found: re.sub(r"\n *", " ", found[0]), text)


def made_folder(folder: Path) -> Path:
    """Make the folder where records go, if it does not exist: before a measurement, whose figures would be lost.

    Raises:
        SetupError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise SetupError(f"cannot make the folder {folder}: {exc.strerror}") from exc
    return folder


LARGEST = 1e12
"""Of all figures, in any unit of ours: a terabyte, or 30 years in milliseconds."""

_STATES = ("complete", "interrupted", "invalid")


LARGEST_SEED = 2**63 - 1
SEED = f"a whole number from 0 to {LARGEST_SEED}"
"""What a seed is."""


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_table(value: Any) -> bool:
    return isinstance(value, dict)


def _is_list_of(kind: type, value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(part, kind) for part in value)


def _is_seed(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST_SEED


def _is_time(value: Any) -> bool:
    try:
        return datetime.fromisoformat(value).utcoffset() == timedelta()
    except (TypeError, ValueError):
        return False


_FIELDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "experiment": (_is_text, "text"),
    "config": (_is_table, "a table"),
    "samples": (_is_table, "a table"),
    "results": (_is_table, "a table"),
    "points": (partial(_is_list_of, dict), "a list of tables"),
    "state": (lambda value: value in _STATES, f"one of {', '.join(_STATES)}"),
    "notes": (partial(_is_list_of, str), "a list of texts"),
    "seed": (lambda value: value is None or _is_seed(value), f"{SEED}, or null where nothing is drawn"),
    "command": (lambda value: bool(value) and _is_list_of(str, value), "a list of texts, the first one the command"),
    "commit": (lambda value: value is None or _is_text(value), "text, or null outside of a checkout"),
    "host": (_is_table, "a table"),
    "measured_at": (_is_time, "a time such as 2026-11-22T10:40:36+00:00"),
}
"""What a record has, whichever command made it: how it is recognised, and in words."""

_HOST: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "cpu": (_is_text, "text"),
    "cores": (lambda value: value is None or isinstance(value, int), "a whole number, or null"),
    "python": (_is_text, "a version"),
    "terrace": (lambda value: value is None or _is_text(value), "a version, or null"),
}
"""What `host` has at least: the machine, and whose versions. What else it has was added as time went on."""

_HOST_SINCE: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "priority": (_is_text, "text"),
    "load_average": (lambda value: _is_text(value) and len(value.split()) == 3, "three numbers in a text"),
}

_MOST_BYTES = 2**29
"""Of a file: twice the longest run of `chaos`. What is larger is no record, and would fill the memory."""

_MOST_SHOWN = 40
"""Characters of a wrong value that a sentence repeats."""


def record_stem(record: Mapping[str, Any]) -> str:
    """Name of the file of a record among others: the experiment and the time."""
    return f"{record['experiment']}-{record['measured_at'].replace(':', '').replace('+0000', 'Z')}"


def read_record(path: Path) -> dict[str, Any]:
    """A record as its fields.

    Raises:
        SetupError: the file cannot be read, is cut off, is no record, or says what no record can say.
    """
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise SetupError(f"{path} is no record: it has more than {_MOST_BYTES // 2**20} MiB")
        fields = json.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise SetupError(f"cannot read the record {path}: {exc.strerror}") from exc
    except (ValueError, RecursionError) as exc:
        raise SetupError(f"{path} is no whole record: {exc}") from exc
    if not isinstance(fields, dict):
        raise SetupError(f"{path} is no record of an experiment: it is no table of fields")
    if missing := _FIELDS.keys() - fields.keys():
        raise SetupError(f"{path} is no whole record of an experiment: it has no {', '.join(sorted(missing))}")
    try:
        fault = _fault(fields)
    except RecursionError as exc:
        raise SetupError(f"{path} is no whole record: {exc}") from exc
    if fault:
        raise SetupError(f"the record {path} is damaged: {fault}")
    return {str(name): value for name, value in fields.items()}


def _fault(fields: Mapping[str, Any]) -> str:
    """What is wrong with the fields of a record, all of which there are; "" for nothing."""
    if fault := _unexpected("", fields, _FIELDS):
        return fault
    host = fields["host"]
    if missing := _HOST.keys() - host.keys():
        return f"host has no {', '.join(sorted(missing))}"
    since = {name: expected for name, expected in _HOST_SINCE.items() if name in host}
    if fault := _unexpected("host.", host, {**_HOST, **since}):
        return fault
    figures = {name: fields[name] for name in ("config", "samples", "points", "results")}
    for place, key, value in _leaves(figures):
        if key == "seed" and value is not None and not _is_seed(value):
            return f"{place} is {_shown(value)}, expected is {SEED}"
    finite = sys.float_info.max
    if place := outside(figures, -finite, finite):
        return f"{place} is no finite number"
    # What a profile says may be as large as its author likes: what comes of it is looked at.
    chosen = {name: value for name, value in fields["config"].items() if not name.endswith("profile")}
    if place := outside({"config": chosen, "points": fields["points"]}, 0, LARGEST):
        return f"{place} is not from 0 to {LARGEST:g}, as all that is measured"
    return ""


def _unexpected(
    prefix: str, table: Mapping[str, Any], expected: Mapping[str, tuple[Callable[[Any], bool], str]]
) -> str:
    """The first value of a table that is not what is expected, in a sentence; "" where all are."""
    for name, (fits, words) in expected.items():
        if not fits(table[name]):
            return f"{prefix}{name} is {_shown(table[name])}, expected is {words}"
    return ""


def _shown(value: Any) -> str:
    """A value of a record in a sentence: as JSON, and its beginning where it is long."""
    text = json.dumps(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def outside(value: Any, least: float, most: float) -> str:
    """Where in tables and lists the first number stands that is not from `least` to `most`, as `points.3.seconds`;
    else "". Seeds are no figures, and not looked at."""
    for place, key, leaf in _leaves(value):
        if isinstance(leaf, float | int) and key != "seed" and not least <= leaf <= most:
            return place
    return ""


def _leaves(value: Any, place: str = "", key: str = "") -> Iterator[tuple[str, str, Any]]:
    """All that stands in tables and lists and is neither: where, as `points.3.seconds`, under which name, and it."""
    parts: Iterable[tuple[Any, Any]]
    if isinstance(value, Mapping):
        parts = value.items()
    elif isinstance(value, list):
        parts = enumerate(value)
    else:
        yield place, key, value
        return
    for name, part in parts:
        yield from _leaves(part, f"{place}.{name}" if place else str(name), str(name))


def origin(record: Mapping[str, Any]) -> str:
    """Where the figures of a record of `terrace experiment` come from: command, commit, time and machine.

    The command is without its output, which decides about nothing.
    """
    arguments = iter(record["command"][1:])
    command = ["terrace"]
    for argument in arguments:
        if argument == "--out":
            next(arguments, None)
        elif argument != "--json" and not argument.startswith("--out="):
            command.append(argument)
    commit, plus, _ = (record["commit"] or "unknown").partition("+")
    when = datetime.fromisoformat(record["measured_at"]).strftime("%Y-%m-%d %H:%M UTC")
    host = record["host"]
    busy = f", load {host['load_average'].split()[0]} at its end" if "load_average" in host else ""
    priority = f", {host['priority']}" if host.get("priority", "nice 0") != "nice 0" else ""
    return (
        f"`{shlex.join(command)}`, commit {commit[:12]}{' with changes' if plus else ''}, {when}, "
        f"{host['cores']} cores ({host['cpu']}){busy}{priority}"
    )


def joined(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Records of one experiment whose points belong together, as if one command had measured them.

    Raises:
        InvalidInput: they were measured under different conditions. What was chosen to be measured may differ: lists in
            the configuration, and the number of runs.
    """
    first, *others = records
    for other in others:
        if _conditions(other) != _conditions(first):
            raise InvalidInput(
                f"the records of {first['measured_at']} and {other['measured_at']} cannot be put together: they differ "
                "in experiment, state or configuration"
            )
    return {
        **first,
        "points": [point for record in records for point in record["points"]],
        "notes": list(dict.fromkeys(note for record in records for note in record["notes"])),
    }


def _conditions(record: Mapping[str, Any]) -> dict[str, Any]:
    config = {name: value for name, value in record["config"].items() if not isinstance(value, list) and name != "runs"}
    return {"experiment": record["experiment"], "state": record["state"], **config}
