"""The generated parts of the reference are those of today's code, and the code describes all that they show."""

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
from jsonschema_rs import Draft202012Validator

from scheduler.api.examples import EXAMPLES, add_examples
from tests.reference import SECTIONS, openapi, pages
from tierkit.settings import ServiceSettings, description


def operations() -> Iterator[tuple[str, dict[str, Any]]]:
    for path, item in openapi()["paths"].items():
        for method, operation in item.items():
            yield f"{method} {path}", operation


def fields() -> Iterator[tuple[str, dict[str, Any]]]:
    """The schemas of fields and of parameters; the description of a parameter is in its schema here."""
    for name, schema in openapi()["components"]["schemas"].items():
        for field, described in schema.get("properties", {}).items():
            yield f"{name}.{field}", described
    for name, operation in operations():
        for parameter in operation.get("parameters", ()):
            words = parameter.get("description", "")
            yield f"{name} {parameter['name']}", {"description": words, **parameter["schema"]}


def test_the_generated_parts_are_up_to_date() -> None:
    stale = [page.name for page, text, wanted in pages() if text != wanted]
    assert stale == [], "write them again: python -m tests.reference"


@pytest.mark.parametrize("settings_class", SECTIONS.values(), ids=SECTIONS)
def test_every_setting_says_what_it_does(settings_class: type[ServiceSettings]) -> None:
    assert [name for name in settings_class.model_fields if len(description(settings_class, name)) < 20] == []


def test_every_operation_and_schema_is_described() -> None:
    found = dict(operations())
    assert len(found) > 90
    assert [name for name, each in found.items() if not (each.get("summary") and each.get("description"))] == []
    schemas = openapi()["components"]["schemas"]
    assert [name for name, each in schemas.items() if not each.get("description")] == []


def test_every_field_and_parameter_has_a_description_and_a_valid_example() -> None:
    found = list(fields())
    assert len(found) > 1000
    assert [name for name, each in found if len(each.get("description", "")) < 10] == []
    assert [name for name, each in found if len(each.get("examples", ())) != 1] == []
    wrong = [
        f"{name}: {error.message}"
        for name, each in found
        for error in _validator(each).iter_errors(each["examples"][0])
    ]
    assert wrong == []


def _validator(schema: dict[str, Any]) -> Draft202012Validator:
    return Draft202012Validator({**schema, "components": openapi()["components"]}, validate_formats=True)


def test_every_example_is_used() -> None:
    assert EXAMPLES.keys() - add_examples(deepcopy(openapi())) == set()


def test_a_field_without_an_example_keeps_none() -> None:
    document = {"components": {"schemas": {"A": {"properties": {"b": {"type": "string"}}}}}, "paths": {}}
    assert add_examples(document, {}) == set()
    assert "examples" not in document["components"]["schemas"]["A"]["properties"]["b"]
