"""The registry of extensions: names from metadata, imports of one at a time, and packages that cannot be used."""

import os
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from terrace.cli import run
from tierkit import extensions
from tierkit.errors import BrokenExtension, InvalidInput
from tierkit.extensions import BUILT_IN

ROOT = Path(__file__).parents[3]
SINK = """
class Kind:
    Options = type("Options", (), {"model_validate": None})
    def __init__(self, name):
        self.name = name
    def open(self, options, context):
        ...
KIND = Kind("a pager")
"""


class Packages:
    """A folder on the path into which a test installs packages."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, name: str, points: str, code: str = "", *, version: str = "1.2") -> None:
        module = name.replace("-", "_")
        (self.folder / f"{module}.py").write_text(code)
        metadata = self.folder / f"{module}-{version}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (metadata / "entry_points.txt").write_text(points)


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_processes: None) -> Iterator[Packages]:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    extensions.others.cache_clear()
    before = set(sys.modules)
    yield Packages(tmp_path)
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(sys.modules[name].__file__):
            del sys.modules[name]
    extensions.others.cache_clear()


def test_the_built_in_ones_are_the_entry_points_of_the_package() -> None:
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert points == {group: found for group, found in BUILT_IN.items() if found}


def test_names_imports_nothing(packages: Packages) -> None:
    packages.add("more-sinks", "[terrace.sinks]\npager = more_sinks:PAGER\n", "raise RuntimeError('imported')")
    assert extensions.names("terrace.sinks")[-1] == "pager"
    assert "more_sinks" not in sys.modules


def test_an_extension_of_another_package_is_loaded(packages: Packages) -> None:
    packages.add("more-sinks", "[terrace.sinks]\npager = more_sinks:KIND\n", SINK)
    assert extensions.load("terrace.sinks", "pager").name == "a pager"  # type: ignore[attr-defined]


def test_an_unknown_name_lists_the_known_ones(packages: Packages) -> None:
    packages.add("more-sinks", "[terrace.sinks]\npager = more_sinks:PAGER\n")
    with pytest.raises(InvalidInput, match=r"has no 'pigeon' here; known: .*pager"):
        extensions.load("terrace.sinks", "pigeon")


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import nothing_of_this_name", "ModuleNotFoundError: No module named 'nothing_of_this_name'"),
        ("raise RuntimeError('it rains')", "RuntimeError: it rains"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("", "AttributeError: module 'faulty' has no attribute 'KIND'"),
        ("KIND = (", "SyntaxError"),
        ("raise ModuleNotFoundError('No module named torch', name='torch')", "it needs the extra 'train': pip install"),
        ("raise RuntimeError('one\\ntwo\\x1b[31m')", r"RuntimeError: one\ntwo\u001b[31m"),
    ],
)
def test_a_package_that_cannot_be_imported_is_named(packages: Packages, code: str, reason: str) -> None:
    packages.add("faulty", "[terrace.sinks]\nfaulty = faulty:KIND\n", code)
    packages.add("sound", "[terrace.sinks]\nsound = sound:KIND\n", SINK)
    with pytest.raises(BrokenExtension, match=r"faulty in terrace.sinks is from the package faulty 1.2, ") as raised:
        extensions.load("terrace.sinks", "faulty")
    assert reason in str(raised.value)
    (trouble,) = extensions.broken()
    assert (trouble.distribution, trouble.version, trouble.name) == ("faulty", "1.2", "faulty")
    assert reason in trouble.fault
    assert extensions.load("terrace.sinks", "sound")


def test_an_import_that_prints_or_ends_the_process_disturbs_no_one(packages: Packages) -> None:
    packages.add("loud", "[terrace.sinks]\nloud = loud:KIND\n", SINK + "print('here I am')")
    packages.add("rude", "[terrace.sinks]\nrude = rude:KIND\n", "import os\nos._exit(7)")
    (trouble,) = extensions.broken()
    assert (trouble.name, trouble.fault) == ("rude", "its import ends the process with the code 7")


def test_an_import_that_never_ends_is_given_up(packages: Packages, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extensions, "_IMPORT_S", 0.3)
    packages.add("slow", "[terrace.sinks]\nslow = slow:KIND\n", "import threading\nthreading.Event().wait()")
    (trouble,) = extensions.broken()
    assert trouble.fault == "its import takes longer than 0.3 s"


def test_a_built_in_name_stays_built_in(packages: Packages) -> None:
    packages.add("other-mlp", "[terrace.networks]\nmlp = other_mlp:KIND\n", "KIND = 1")
    assert extensions.names("terrace.networks").count("mlp") == 1
    extensions.check_name("terrace.networks", "mlp")
    (trouble,) = extensions.broken()
    assert (trouble.distribution, trouble.fault) == ("other-mlp", "Terrace has its own mlp, and uses that")
    assert "other_mlp" not in sys.modules


def test_a_name_that_two_packages_add_is_refused(packages: Packages) -> None:
    packages.add("one", "[terrace.sinks]\npager = one:KIND\n", "KIND = 1")
    packages.add("two", "[terrace.sinks]\npager = two:KIND\n", "KIND = 2")
    assert "pager" not in extensions.names("terrace.sinks")
    with pytest.raises(BrokenExtension, match="another package adds the same name"):
        extensions.load("terrace.sinks", "pager")
    assert sorted(each.distribution for each in extensions.broken()) == ["one", "two"]


@pytest.mark.parametrize("name", ["A", "a b", "a/b", "-a", "a" * 64, "\x1b[31m"])
def test_a_name_that_is_none_is_refused(packages: Packages, name: str) -> None:
    packages.add("odd", f"[terrace.sinks]\n{name} = odd:KIND\n", "KIND = 1")
    assert name not in extensions.names("terrace.sinks")
    (trouble,) = extensions.broken()
    assert "lower-case letters" in trouble.fault


def test_a_group_that_terrace_does_not_have_is_a_fault(packages: Packages) -> None:
    packages.add("odd", "[terrace.sink]\nodd = odd:KIND\n", "KIND = 1")
    (trouble,) = extensions.broken()
    assert "Terrace has no group terrace.sink; there are terrace.engines" in trouble.fault


@pytest.mark.parametrize("points", ["[terrace.sinks]\nno equals sign\n", "[terrace.sinks]\n= odd:KIND\n"])
def test_a_damaged_file_hides_no_other_package(packages: Packages, points: str) -> None:
    packages.add("damaged", points)
    packages.add("sound", "[terrace.sinks]\nsound = sound:KIND\n", SINK)
    assert extensions.load("terrace.sinks", "sound")
    (trouble,) = extensions.broken()
    assert trouble.distribution == "damaged"


@pytest.mark.parametrize("value", ["odd:KIND [extra]", "not a module:KIND", "odd:none.such", ""])
def test_a_value_that_names_no_object_is_a_fault(packages: Packages, value: str) -> None:
    packages.add("odd", f"[terrace.sinks]\nodd = {value}\n", "KIND = 1")
    assert [each.distribution for each in extensions.broken()] == ["odd"]


def test_of_two_copies_the_first_on_the_path_counts(
    packages: Packages, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages.add("more-sinks", "[terrace.sinks]\npager = more_sinks:KIND\n", SINK)
    newer = Packages(tmp_path_factory.mktemp("newer"))
    code = SINK.replace("a pager", "a newer one")
    newer.add("more-sinks", "[terrace.sinks]\npager = more_sinks:KIND\n", code, version="2")
    monkeypatch.syspath_prepend(str(newer.folder))
    assert extensions.load("terrace.sinks", "pager").name == "a newer one"  # type: ignore[attr-defined]


@pytest.mark.parametrize("group", BUILT_IN)
def test_an_object_that_is_no_extension_is_named(packages: Packages, group: str) -> None:
    packages.add("odd", f"[{group}]\nodd = odd:KIND\n", "KIND = 1")
    with pytest.raises(
        BrokenExtension, match=r"package odd 1\.2, which cannot be used: TypeError: it (has no|must be)"
    ):
        extensions.load(group, "odd")
    (trouble,) = extensions.broken()
    assert "an object of the class int" in trouble.fault


def test_a_class_instead_of_its_instance_is_named(packages: Packages) -> None:
    packages.add("odd", "[terrace.sinks]\nodd = odd:Kind\n", SINK)
    with pytest.raises(BrokenExtension, match="it must be an object, and is the class Kind: name an instance of it"):
        extensions.load("terrace.sinks", "odd")


@pytest.mark.parametrize("group", BUILT_IN)
def test_terraces_own_extensions_have_the_parts_of_their_groups(group: str) -> None:
    if group in ("terrace.networks", "terrace.strategies"):
        pytest.importorskip("torch")
    for name in BUILT_IN[group]:
        assert extensions.fault_of(group, extensions.load(group, name)) == ""


def test_an_engine_that_is_none_ends_the_node_with_a_sentence(
    packages: Packages, capfd: pytest.CaptureFixture[str]
) -> None:
    packages.add("odd", "[terrace.engines]\neone = odd:KIND\n", "KIND = 1")
    with pytest.raises(SystemExit) as ended:
        run(["cloud", "--engine", "eone", "--port", "0"])
    said = capfd.readouterr().err
    assert ended.value.code not in (0, None)
    assert "package odd 1.2, which cannot be used: TypeError: it has no reads" in said.replace("\n", " ")
    assert "Traceback" not in said
