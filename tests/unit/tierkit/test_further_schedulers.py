"""The setting `also`: where it may be given, and what is wrong with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_node.settings import EdgeSettings
from tierkit.errors import SetupError
from tierkit.fleet import local_plan
from tierkit.settings import load_settings
from tierkit.types import Tier

FIRST = "http://a:8070"


def named(settings: EdgeSettings) -> list[tuple[str, tuple[str, ...]]]:
    return [(each.name, each.urls) for each in settings.schedulers]


def test_flags_and_the_environment_name_urls(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["http://b:8070", "north=http://c:8070,http://d:8070"]
    expected = [
        ("a:8070", (FIRST,)),
        ("b:8070", ("http://b:8070",)),
        ("north", ("http://c:8070", "http://d:8070")),
    ]
    settings = load_settings(EdgeSettings, flags={"scheduler": FIRST, "also": given})
    assert named(settings) == expected
    monkeypatch.setenv("TERRACE_EDGE_SCHEDULER", FIRST)
    monkeypatch.setenv("TERRACE_EDGE_ALSO", " ".join(given))
    assert named(load_settings(EdgeSettings, flags={})) == expected


def test_a_fleet_file_names_them_in_a_list() -> None:
    plan = local_plan({Tier.CLOUD: 1}, scheduler={}, tiers={Tier.CLOUD: {"also": ["http://b:8070", "http://c:8070"]}})
    (also,) = {service.settings["also"] for service in plan.services if "also" in service.settings}
    settings = load_settings(EdgeSettings, flags={"scheduler": FIRST, "also": [also]})
    assert [each.name for each in settings.schedulers] == ["a:8070", "b:8070", "c:8070"]


def test_tables_may_have_tokens(tmp_path: Path) -> None:
    for name in ("own", "other"):
        (tmp_path / name).write_text(name.ljust(40, "x") + "\n")
        (tmp_path / name).chmod(0o600)
    config = tmp_path / "edge.toml"
    config.write_text(
        f"""
[edge]
scheduler = "{FIRST}"
token_file = "{tmp_path / "own"}"
[[also]]
scheduler = ["http://b:8070", "http://c:8070"]
token_file = "{tmp_path / "other"}"
[[also]]
scheduler = "http://d:8070"
name = "south"
"""
    )
    settings = load_settings(EdgeSettings, flags={}, config=config)
    assert [each.name for each in settings.schedulers] == ["a:8070", "b:8070", "south"]
    assert [(each.token() or "").rstrip("x") for each in settings.schedulers] == ["own", "other", "own"]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"also": ["http://b:8070"]}, "needs the setting scheduler"),
        ({"scheduler": FIRST, "also": [FIRST]}, "must have different URLs, and http://a:8070 occurs twice"),
        ({"scheduler": FIRST, "also": ["x=http://b:1", "x=http://c:1"]}, "must have different names, and x occurs"),
        ({"scheduler": FIRST, "also": ["b:8070"]}, "--also"),
        ({"scheduler": FIRST, "also": ["x="]}, "--also"),
        ({"scheduler": FIRST, "also": ["others=http://b:1"]}, "others occurs twice"),
    ],
)
def test_what_is_wrong_is_said(flags: dict[str, object], sentence: str) -> None:
    with pytest.raises(SetupError, match=sentence):
        load_settings(EdgeSettings, flags=flags)


def test_without_schedulers_there_are_none() -> None:
    assert EdgeSettings().schedulers == ()
