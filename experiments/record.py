"""Run records: the measurements of a run, with all that is needed to repeat it.

Tables and plots are made only from records. A record is written once, whole (temporary file, then rename), so a run
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from tierkit.atomic import made_folder, write_atomically
from tierkit.documents import faults
from tierkit.errors import InvalidInput, SetupError
from tierkit.plaintext import without_passwords

__all__ = [
    "LARGEST_SEED",
    "RunRecord",
    "Spread",
    "host_facts",
    "joined",
    "origin",
    "ranged",
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


def ranged(name: str, samples: Sequence[float], digits: int) -> dict[str, float]:
    """A figure of a row: the median of `samples`, and their range."""
    figure = {name: statistics.median(samples), f"min_{name}": min(samples), f"max_{name}": max(samples)}
    return {field: round(value, digits) for field, value in figure.items()}


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
    """Scheduling priority of this process and of the processes that it starts."""
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


LARGEST_SEED = 2**63 - 1


def _in_utc(text: str) -> str:
    if datetime.fromisoformat(text).utcoffset() != timedelta():
        raise ValueError("a time such as 2026-11-22T10:40:36+00:00 is expected")
    return text


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True)


class Host(_Part):
    """The machine, and the versions of what a figure depends on, whichever they are."""

    model_config = ConfigDict(extra="allow")

    cpu: str
    cores: int | None
    python: str
    terrace: str | None
    priority: str = "nice 0"
    load_average: str | None = Field(default=None, pattern=r"^\S+ \S+ \S+$")


class RunRecord(_Part):
    """One measurement.

    `samples` holds every raw figure by name (the unit is the suffix of the name), `results` what was derived from them.
    """

    experiment: str
    config: dict[str, Any]
    samples: dict[str, Any]
    results: dict[str, Any]
    points: list[dict[str, Any]] = Field(default_factory=list)
    """Raw figures that belong together, one run each: its conditions, and what was measured under them."""
    state: Literal["complete", "interrupted", "invalid"] = "complete"
    """interrupted: what was measured until then is here; invalid: `notes` say why."""
    notes: list[str] = Field(default_factory=list)
    """Facts that a reader of the figures must know."""
    seed: int | None = Field(default=None, ge=0, le=LARGEST_SEED)
    """Seed of the random choices; None if there are none."""
    command: list[str] = Field(
        default_factory=lambda: [Path(sys.argv[0]).name, *_without_places(sys.argv[1:])], min_length=1
    )
    commit: str | None = Field(default_factory=lambda: source_commit())
    """Commit of the code; None outside a checkout."""
    host: Host = Field(default_factory=lambda: Host.model_validate(host_facts()))
    measured_at: Annotated[str, AfterValidator(_in_utc)] = Field(
        default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds")
    )

    def write(self, folder: Path, *, stem: str | None = None) -> Path:
        """Write the record into `folder` and return its path; an existing record is never overwritten.

        Args:
            stem: of the file's name. Default: the experiment and the time.

        Raises:
            SetupError: it cannot be written; nothing is left of it.
        """
        text = _as_json(self.model_dump())  # first: what JSON cannot hold must leave no file behind
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
    """Write indented JSON; each list or table of plain values takes one line."""
    text = json.dumps(fields, indent=1)
    return _INNERMOST.sub(lambda found: re.sub(r"\n *", " ", found[0]), text)


_MOST_BYTES = 2**29
"""Most bytes of a record: twice the longest run of `chaos`. A larger file is something else, and would fill the
memory.
"""


def record_stem(record: Mapping[str, Any]) -> str:
    """Name of the file of a record among others: the experiment and the time."""
    return f"{record['experiment']}-{record['measured_at'].replace(':', '').replace('+0000', 'Z')}"


def read_record(path: Path) -> dict[str, Any]:
    """Read the fields of a record.

    Raises:
        SetupError: the file cannot be read, is cut off, or does not hold a valid record.
    """
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise SetupError(f"{path} is not a record: it has more than {_MOST_BYTES // 2**20} MiB")
        fields = json.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise SetupError(f"cannot read the record {path}: {exc.strerror}") from exc
    except (ValueError, RecursionError) as exc:
        raise SetupError(f"{path} is not a whole record: {exc}") from exc
    if not isinstance(fields, dict):
        raise SetupError(f"{path} is not a record of an experiment: it is not a table of fields")
    if missing := RunRecord.model_fields.keys() - fields.keys():
        raise SetupError(f"{path} is not a whole record of an experiment: it has no {', '.join(sorted(missing))}")
    try:
        RunRecord.model_validate(fields)
    except ValidationError as exc:
        raise SetupError(f"the record {path} is damaged: {faults(exc, RunRecord)}") from exc
    return fields


def _without_places(arguments: Sequence[str]) -> list[str]:
    """Arguments of a command without where its output, its tools and the data sets are, which decides about no figure,
    and without the passwords of URLs."""
    places = "--out", "--venvs", "--data"
    given, kept = iter(arguments), []
    for argument in given:
        if argument in places:
            next(given, None)
        elif argument != "--json" and not argument.startswith(tuple(f"{place}=" for place in places)):
            kept.append(without_passwords(argument))
    return kept


def origin(record: Mapping[str, Any]) -> str:
    """Source of the figures of a record: command, commit, time and machine."""
    words = _without_places(record["command"][1:])
    command = ["terrace", *words] if words[:1] == ["experiment"] else ["python", "-m", "benchmarks", *words]
    commit, plus, _ = (record["commit"] or "unknown").partition("+")
    when = datetime.fromisoformat(record["measured_at"]).strftime("%Y-%m-%d %H:%M UTC")
    host = record["host"]
    busy = f", load {host['load_average'].split()[0]} at its end" if "load_average" in host else ""
    priority = f", {host['priority']}" if host.get("priority", "nice 0") != "nice 0" else ""
    return (
        f"`{shlex.join(command)}` of commit {commit[:12]}{' with changes' if plus else ''}, {when}, "
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
