"""Settings of sources, spool and uplink: from the file, the environment and flags; what is wrong is named."""

from datetime import time
from pathlib import Path
from typing import Any

import pytest

from end_node.settings import EndSettings, SourceSettings
from end_node.sources.choosing import open_source_of
from tierkit.errors import InvalidInput, SetupError
from tierkit.settings import load_settings

FILE = """
[end]
node_id = "pi-1"

[[source]]
name = "gate"
url = "rtsp://me:secret@10.0.0.9/main"
rate = 2.0

[uplink]
bytes_per_day = "50MB"
hours = "22:00-06:00"

[spool]
size = "2GiB"
"""


def load(folder: Path, text: str = FILE, **flags: object) -> EndSettings:
    (folder / "end.toml").write_text(text)
    return load_settings(EndSettings, flags=flags, config=folder / "end.toml")


def test_tables_of_the_file(tmp_path: Path) -> None:
    settings = load(tmp_path)
    (source,) = settings.source
    assert (source.name, source.kind, source.rate, source.keep) == ("gate", None, 2.0, "none")
    assert (settings.uplink.bytes_per_day, settings.uplink.hours) == (50_000_000, (time(22), time(6)))
    assert (settings.spool.size, settings.uplink.escalate) == (2 * 2**30, "unsure")
    assert "secret" not in repr(settings)


def test_a_file_with_sources_alone_will_do(tmp_path: Path) -> None:
    assert load(tmp_path, FILE.partition("\n\n")[2]).has_sources


def test_the_flag_and_the_environment_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERRACE_END_SOURCE", "a=rtsp://h/1 b=push")
    monkeypatch.setenv("TERRACE_END_SPOOL", '{"size": "5MB"}')
    found = load(tmp_path)
    assert [source.name for source in found.source] == ["a", "b"]
    assert found.spool.size == 5_000_000
    assert [source.name for source in load(tmp_path, source=["c=/srv/in"]).source] == ["c"]


def test_the_spool_lies_in_the_state_folder_of_systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STATE_DIRECTORY", raising=False)
    assert load(tmp_path).spool_folder.parts[-2:] == ("terrace", "pi-1")
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path))
    assert load(tmp_path).spool_folder == tmp_path / "spool"


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        ("rate = 2.0", "rat = 2.0", "did you mean rate"),
        ("rate = 2.0", "rate = 0", "rate"),
        ("rate = 2.0", "rate = nan", "rate"),
        ("rate = 2.0", 'kind = "telepathy"', "kind"),
        ("rate = 2.0", 'kind = "snapshot"', "the url of a snapshot is http:// or https://, not rtsp://"),
        ("rate = 2.0", 'kind = "push"', "a push source has no url"),
        ("rate = 2.0", 'after = "move"', "move_to"),
        ("rate = 2.0", 'kind = "stream"\nafter = "delete"', "after is for folders"),
        ('url = "rtsp://me:secret@10.0.0.9/main"', 'kind = "push"\nchanged = 0.1', "changed is for streams"),
        ('name = "gate"', 'name = "Gate"', "name"),
        ('url = "rtsp://me:secret@10.0.0.9/main"', "", "url is missing"),
        ('url = "rtsp://me:secret@10.0.0.9/main"', 'url = "a\\u0000b"', "control characters"),
        ("[[source]]", "[source]", "write [[source]]"),
        ("[uplink]", "[uplnk]", "did you mean [uplink]"),
        ('"50MB"', '"50 apples"', "500MB or 2GiB"),
        ('"50MB"', "-1", "bytes_per_day"),
        ('"22:00-06:00"', '"25:00-06:00"', "22:00-06:00"),
        ('"22:00-06:00"', '"06:00-06:00"', "whole day"),
        ('"22:00-06:00"', "22", "22:00-06:00"),
        ('"2GiB"', "1", "size"),
        ("[spool]", "[spool]\nplace = 1", "place"),
    ],
)
def test_what_is_wrong_is_named(before: str, after: str, named: str, tmp_path: Path) -> None:
    assert before in FILE
    with pytest.raises(SetupError) as caught:
        load(tmp_path, FILE.replace(before, after))
    assert named in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("where", [".", "..", "../.."])
def test_files_are_not_moved_to_where_they_come_from(where: str, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    text = f'[[source]]\nname = "a"\nurl = "{folder}"\nafter = "move"\nmove_to = "{(folder / where).resolve()}"\n'
    with pytest.raises(SetupError, match="move_to"):
        load(tmp_path, text)
    assert load(tmp_path, text.replace("move_to = ", f'move_to = "{tmp_path}/done" # ')).source[0].move_to


def test_tiers_that_may_fetch_kept_pictures(tmp_path: Path) -> None:
    text = FILE.replace('bytes_per_day = "50MB"\n', "")
    learn = load(tmp_path, text + '[learn]\nsize = "4MB"\npictures_to = ["edge"]\n').learn
    assert learn is not None
    assert learn.pictures_to == ("edge",)
    silent = load(tmp_path, text + '[learn]\nsize = "4MB"\n').learn
    assert silent is not None
    assert silent.pictures_to == ()
    with pytest.raises(SetupError, match="'edge' or 'cloud'"):
        load(tmp_path, text + '[learn]\nsize = "4MB"\npictures_to = ["end"]\n')
    with pytest.raises(SetupError, match="bytes_per_day"):
        load(tmp_path, FILE + '[learn]\nsize = "4MB"\npictures_to = ["edge"]\n')


@pytest.mark.parametrize(
    ("place", "setting", "named"),
    [("folder", {"changed": 0.1}, "changed is for streams"), ("film.mp4", {"after": "delete"}, "after is for folders")],
)
async def test_what_does_not_fit_the_kind_of_a_path_is_named(
    place: str, setting: dict[str, Any], named: str, tmp_path: Path
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "film.mp4").touch()
    with pytest.raises(InvalidInput, match=named):
        await open_source_of(SourceSettings(name="a", url=str(tmp_path / place), **setting), None)
