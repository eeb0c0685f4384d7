"""The generated parts of the reference are those of today's code, and every setting says what it does."""

import pytest

from tests.reference import SECTIONS, openapi, pages
from tierkit.settings import ServiceSettings, description


def test_the_generated_parts_are_up_to_date() -> None:
    stale = [page.name for page, text, wanted in pages() if text != wanted]
    assert stale == [], "write them again: python -m tests.reference"


@pytest.mark.parametrize("settings_class", SECTIONS.values(), ids=SECTIONS)
def test_every_setting_says_what_it_does(settings_class: type[ServiceSettings]) -> None:
    assert [name for name in settings_class.model_fields if len(description(settings_class, name)) < 20] == []


def test_every_operation_has_a_summary() -> None:
    found = [operation for item in openapi()["paths"].values() for operation in item.values()]
    assert len(found) > 90
    assert [operation for operation in found if not operation.get("summary")] == []
