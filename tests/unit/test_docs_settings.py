"""docs/reference/settings.md names every setting of every service, with its default and its documentation."""

from pathlib import Path

import pytest
from pydantic import BaseModel

from cloud_node.settings import CloudSettings
from edge_node.settings import EdgeSettings
from end_node.settings import EndSettings, LearnSettings, SourceSettings, SpoolSettings, UplinkSettings
from scheduler.settings import SchedulerSettings
from tierkit.settings import FurtherScheduler, NodeSettings, ServiceSettings, UpperSettings, description

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "settings.md"
SECTIONS: dict[str, type[ServiceSettings]] = {
    "All services": ServiceSettings,
    "All nodes": NodeSettings,
    "Edge and cloud nodes": UpperSettings,
    "End node": EndSettings,
    "Edge node": EdgeSettings,
    "Cloud node": CloudSettings,
    "Scheduler": SchedulerSettings,
}


TABLES: dict[str, type[BaseModel]] = {
    "Table source": SourceSettings,
    "Table uplink": UplinkSettings,
    "Table spool": SpoolSettings,
    "Table learn": LearnSettings,
    "Table also": FurtherScheduler,
}


def own_fields(settings_class: type[ServiceSettings]) -> list[str]:
    """Fields that the class adds, or whose default it changes."""
    base = settings_class.__bases__[0]
    inherited = base.model_fields if issubclass(base, ServiceSettings) else {}
    return [
        name
        for name, field in settings_class.model_fields.items()
        if name not in inherited or inherited[name].default != field.default
    ]


def shown(default: object) -> str:
    match default:
        case None | "" | () | BaseModel():
            return ""
        case tuple():
            return f"`{','.join(default)}`"
        case float():
            return f"`{default:g}`"
    return f"`{default}`"


def row(settings_class: type[BaseModel], name: str) -> str:
    field = settings_class.model_fields[name]
    text = " ".join((field.description or "").split())
    if issubclass(settings_class, ServiceSettings):
        text = description(settings_class, name)
    return f"| `{name}` | {'' if field.is_required() else shown(field.default)} | {text} |"


def section(title: str) -> str:
    _, _, rest = PAGE.read_text(encoding="utf-8").partition(f"\n## {title}\n")
    return rest.partition("\n## ")[0]


@pytest.mark.parametrize("title", SECTIONS)
def test_every_setting_is_documented(title: str) -> None:
    """A failure shows the rows to paste."""
    settings_class = SECTIONS[title]
    text = section(title)
    missing = [line for name in own_fields(settings_class) if (line := row(settings_class, name)) not in text]
    assert missing == [], "\n".join(["these rows are not on the page:", *missing])
    assert text.count("\n| `") == len(own_fields(settings_class)), "the page has rows for settings that are gone"


@pytest.mark.parametrize("title", TABLES)
def test_every_key_of_a_table_is_documented(title: str) -> None:
    """A failure shows the rows to paste."""
    text, kind = section(title), TABLES[title]
    missing = [line for name in kind.model_fields if (line := row(kind, name)) not in text]
    assert missing == [], "\n".join(["these rows are not on the page:", *missing])
    assert text.count("\n| `") == len(kind.model_fields), "the page has rows for keys that are gone"


@pytest.mark.parametrize("settings_class", SECTIONS.values(), ids=SECTIONS)
def test_every_setting_says_what_it_does(settings_class: type[ServiceSettings]) -> None:
    assert [name for name in settings_class.model_fields if len(description(settings_class, name)) < 20] == []
