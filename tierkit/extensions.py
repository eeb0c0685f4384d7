"""Extensions: what Terrace and other installed packages add to it, by group and name.

A package adds one by an entry point, `name = "module:object"`, in one of the groups of `BUILT_IN`. Terrace's own ones
are entry points too. Only installed packages count: nothing here reads a name of a module from a message or a setting.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from operator import attrgetter
from typing import Any, NamedTuple

from tierkit.distribution import DISTRIBUTION
from tierkit.errors import BrokenExtension, InvalidInput
from tierkit.extras import training_extra
from tierkit.plaintext import one_line

__all__ = ["BUILT_IN", "Extension", "broken", "check_name", "fault_of", "load", "name_in", "names", "others"]

BUILT_IN: dict[str, dict[str, str]] = {
    "terrace.engines": {
        "onnx": "cloud_node.engines.onnx:ENGINE",
        "oip": "cloud_node.engines.oip:ENGINE",
        "ray": "cloud_node.engines.ray:ENGINE",
    },
    "terrace.strategies": {
        "fedavg": "training.strategies.named:FEDAVG",
        "sgd": "training.strategies.named:SGD",
        "downpour": "training.strategies.named:DOWNPOUR",
        "dc-constant": "training.strategies.named:DC_CONSTANT",
        "dc-adaptive": "training.strategies.named:DC_ADAPTIVE",
        "average": "training.strategies.named:AVERAGE",
        "crowdsourced": "training.strategies.named:CROWDSOURCED",
        "bmuf": "training.strategies.named:BMUF",
        "diloco": "training.strategies.named:DILOCO",
        "tournament": "training.strategies.named:TOURNAMENT",
        "lbfgs": "training.strategies.named:LBFGS",
        "allreduce": "training.strategies.named:ALLREDUCE",
        "elastic": "training.strategies.named:ELASTIC",
        "gossip": "training.strategies.named:GOSSIP",
        "ensemble": "training.strategies.named:ENSEMBLE",
        "pipeline": "training.strategies.named:PIPELINE",
        "hybrid": "training.strategies.named:HYBRID",
        "factors": "training.strategies.named:FACTORS",
    },
    "terrace.encoders": {"noise": "encryption.noise:NOISE"},
    "terrace.sources": {
        "stream": "end_node.sources.video:open_stream",
        "camera": "end_node.sources.video:open_camera",
        "folder": "end_node.sources.folder:open_folder",
        "snapshot": "end_node.sources.snapshot:SnapshotSource",
        "push": "end_node.sources.push:open_push",
    },
    "terrace.sinks": {
        "mqtt": "scheduler.sinks.mqtt:MQTT",
        "webhook": "scheduler.sinks.webhook:WEBHOOK",
    },
    "terrace.networks": {
        "alexnet": "models.training.networks.alexnet:AlexNet",
        "early-exit": "models.training.networks.early_exit:EarlyExit",
        "mlp": "models.training.networks.mlp:Mlp",
        "mobilenet-v1": "models.training.networks.mobilenet:MobileNetV1",
        "resnet-34": "models.training.networks.resnet:ResNet34",
        "wide-resnet": "models.training.networks.wideresnet:WideResNet",
    },
}
"""Terrace's own entry points: group, name, object. The same as in pyproject.toml; they are found without metadata."""

_PARTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "terrace.engines": (("reads", "check", "batch_images", "load", "load_next"),),
    "terrace.strategies": (("config", "rule"), ("model_dump_json",)),
    "terrace.encoders": (("hide", "restore"),),
    "terrace.sinks": (("Options.model_validate", "open"),),
}
"""The attributes that the objects of a group must have, or others that will do. Sources and networks are called."""
_CALLED = ("terrace.sources", "terrace.networks")
_IMPORTS_AT_ONCE = 4

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
_MOST_REASON = 300
"""Characters of the reason why an import failed."""
_IMPORT_S = 60.0


class Extension(NamedTuple):
    """An entry point of another package."""

    group: str
    name: str
    value: str
    """Its object, `module:attribute`."""
    distribution: str
    version: str
    fault: str = ""
    """Reason why it cannot be used; empty if no reason is known."""


def names(group: str) -> tuple[str, ...]:
    """Names in a group: Terrace's own, then the names of other packages. Imports none of them."""
    return (*BUILT_IN[group], *sorted(each.name for each in others() if each.group == group and not each.fault))


def check_name(group: str, name: str) -> None:
    """Check that a group has this name.

    Raises:
        InvalidInput: it does not; the message lists the names.
        BrokenExtension: a package adds it in a way that cannot be used.
    """
    if name in BUILT_IN[group]:
        return
    found = [each for each in others() if (each.group, each.name) == (group, name)]
    if not found:
        known = ", ".join(names(group)) or "none"
        raise InvalidInput(
            f"{group} has no {name[:64]!r} here; known: {known}. If a package adds it, install that package"
        )
    if found[0].fault:
        raise BrokenExtension(_sentence(found[0]))


def name_in(group: str) -> Callable[[str], str]:
    """Return a check for pydantic: it takes a name of the group, and raises ValueError for others."""

    def check(name: str) -> str:
        try:
            check_name(group, name)
        except InvalidInput as error:
            raise ValueError(str(error)) from error
        return name

    return check


def load(group: str, name: str) -> object:
    """Import the object of this name.

    Raises:
        InvalidInput: there is no such name; the message lists the names.
        BrokenExtension: the package that adds it cannot be used; the message names it.
        ImportError: a built-in one needs an extra that is not installed.
    """
    check_name(group, name)
    if (value := BUILT_IN[group].get(name)) is not None:
        return _resolve(value)
    return _import(next(each for each in others() if (each.group, each.name) == (group, name)))


def fault_of(group: str, found: object) -> str:
    """Why an object cannot be an extension of a group, as far as its attributes show; empty if it can."""
    if group in _CALLED:
        return "" if callable(found) else f"it must be a class or a function, and is {_described(found)}"
    if isinstance(found, type):
        return f"it must be an object, and is the class {found.__name__}: name an instance of it"
    missing = [[part for part in parts if not _has(found, part)] for parts in _PARTS[group]]
    return f"it has no {', '.join(missing[0])}: it is {_described(found)}" if all(missing) else ""


def _has(found: object, part: str) -> bool:
    try:
        attrgetter(part)(found)
    except AttributeError:
        return False
    return True


def _described(found: object) -> str:
    kind = type(found)
    if isinstance(found, type) or callable(found):
        return f"the {'class' if isinstance(found, type) else kind.__name__} {getattr(found, '__name__', '')}".rstrip()
    return f"an object of the class {kind.__name__}"


def broken() -> list[Extension]:
    """Import each extension of other packages in a process, some at a time, and list those that cannot be used."""
    from concurrent.futures import ThreadPoolExecutor  # takes time that a start without it saves

    with ThreadPoolExecutor(_IMPORTS_AT_ONCE) as threads:
        return [each for each in threads.map(_tried, others()) if each.fault]


@cache
def others() -> tuple[Extension, ...]:
    """Entry points of other packages in Terrace's groups, with and without a fault. Read once in a process."""
    found = list(_scan())
    adding = Counter((each.group, each.name) for each in found)
    return tuple(each._replace(fault=each.fault or _refusal(each, adding)) for each in found)


def _scan() -> Iterator[Extension]:
    import importlib.metadata  # takes time that a start without it saves

    seen: set[str] = set()
    for distribution in importlib.metadata.distributions():
        # Most packages have none: do not parse their metadata.
        if "terrace." not in (distribution.read_text("entry_points.txt") or ""):
            continue
        package, version = str(distribution.metadata["Name"]), str(distribution.metadata["Version"])
        # The first on the path counts, as in imports.
        if package == DISTRIBUTION or package in seen:
            continue
        seen.add(package)
        try:
            points = [(each.group, each.name, each.value) for each in distribution.entry_points]
        # One damaged file must not hide the packages after it.
        except Exception as error:
            fault = f"its entry_points.txt cannot be read: {_why(error)}"
            yield Extension(group="", name="", value="", distribution=package, version=version, fault=fault)
            continue
        for group, name, value in points:
            if group.startswith("terrace."):
                yield Extension(group=group, name=name, value=value, distribution=package, version=version)


def _refusal(extension: Extension, adding: Counter[tuple[str, str]]) -> str:
    """Return why an extension cannot be used, as far as its metadata shows; empty if it can."""
    if extension.group not in BUILT_IN:
        return f"Terrace has no group {extension.group}; there are {', '.join(BUILT_IN)}"
    if extension.name in BUILT_IN[extension.group]:
        return f"Terrace has its own {extension.name}, and uses that"
    if not _NAME.fullmatch(extension.name):
        return "a name has 1 to 63 lower-case letters, digits, - and _, and begins with a letter or digit"
    if adding[extension.group, extension.name] > 1:
        return "another package adds the same name: uninstall one of them"
    return ""


def _tried(extension: Extension) -> Extension:
    if extension.fault:
        return extension
    # An import may print, hang, or end the process.
    try:
        child = subprocess.run(
            [sys.executable, "-P", "-m", "tierkit.extensions", extension.group, extension.value],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            errors="replace",
            timeout=_IMPORT_S,
        )
    except subprocess.TimeoutExpired:
        return extension._replace(fault=f"its import takes longer than {_IMPORT_S:g} s")
    ended = f"its import ends the process with the code {child.returncode}"
    return extension._replace(fault=child.stdout[:_MOST_REASON] or (ended if child.returncode else ""))


def _try() -> None:
    """Import the object that the command line names with its group, and write to standard output why that fails."""
    answer = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    try:
        with training_extra("it"):
            _usable(*sys.argv[1:])
    except (Exception, SystemExit) as error:
        os.write(answer, _why(error).encode(errors="replace"))


def _resolve(value: str) -> object:
    module, _, path = value.partition(":")
    found: Any = import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    return found


def _usable(group: str, value: str) -> object:
    """Import an object. Raises TypeError if it cannot be an extension of the group."""
    found = _resolve(value)
    if fault := fault_of(group, found):
        raise TypeError(fault)
    return found


def _import(extension: Extension) -> object:
    try:
        with training_extra("it"):
            return _usable(extension.group, extension.value)
    # Code of others may raise anything, and even try to exit; Terrace continues without it.
    except (Exception, SystemExit) as error:
        raise BrokenExtension(_sentence(extension._replace(fault=_why(error)))) from error


def _sentence(extension: Extension) -> str:
    package = f"{extension.distribution} {extension.version}"
    return (
        f"{extension.name} in {extension.group} is from the package {package}, which cannot be used: {extension.fault}"
    )


def _why(error: BaseException) -> str:
    return f"{type(error).__name__}: {one_line(str(error))[:_MOST_REASON]}"


if __name__ == "__main__":
    _try()
