"""What the fuzzer sends, and what it counts."""

from collections import Counter
from typing import Any

import pytest

from experiments.fuzz.corpus import SCHEDULER, Template, corpus
from experiments.fuzz.experiment import FUZZ
from experiments.fuzz.mutations import Delivery, make
from models.data import read_sample
from models.manifest import load_manifest
from tierkit.types import Tier


@pytest.fixture(scope="module")
def templates() -> list[Template]:
    return corpus(load_manifest(), read_sample().images[:3])


def test_a_seed_makes_the_same_requests_again_and_another_seed_others(templates: list[Template]) -> None:
    first = [make(templates, 0, number) for number in range(200)]
    assert first == [make(templates, 0, number) for number in range(200)]
    assert first != [make(templates, 1, number) for number in range(200)]


def test_every_service_gets_requests_sent_in_every_way(templates: list[Template]) -> None:
    mutants = [make(templates, 0, number) for number in range(2000)]
    assert Counter(mutant.service for mutant in mutants).keys() == {SCHEDULER, Tier.END, Tier.EDGE}
    assert Counter(mutant.delivery for mutant in mutants).keys() == set(Delivery)


@pytest.mark.parametrize(
    ("kind", "start"), [("tiff", b"II*\0"), ("avif", b"ftypavif"), ("heif", b"ftypheic"), ("webp", b"WEBP")]
)
def test_uploads_in_each_format_are_among_them(templates: list[Template], kind: str, start: bytes) -> None:
    if kind == "heif":
        pytest.importorskip("pillow_heif", reason="needs the extra 'heic' (pillow-heif)")
    assert any(start in template.body for template in templates if template.path == "/v1/jobs")


def test_the_requests_reach_what_they_are_to_break(templates: list[Template]) -> None:
    contents = [make(templates, 0, number).content for number in range(20_000)]
    wanted = {
        "deep JSON": b'{"a":' * 900,
        "a number of 400 digits": b"1" + b"0" * 400,
        "megabytes of JSON": b"[" + b"[]," * 100_000,
        "a boundary that is too long": b"boundary=" + b"b" * 300,
        "a length that lies": b"Content-Length: 1000000000000000",
        "a NUL": b"\\u0000",
    }
    missing = {what for what, part in wanted.items() if not any(part in content for content in contents)}
    assert not missing
    assert any(content == b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" for content in contents)


def point(**changed: Any) -> dict[str, Any]:
    seen = {
        "health_checks": 7,
        "slowest_health_check_s": 0.0123,
        "failed_health_checks": 0,
        "answers": 40,
        "wrong_answers": 0,
        "missing_answers": 0,
        "refusals": {},
    }
    return {
        "what": "fuzz",
        "requests": 10,
        "by_status": {"200": 3, "400": 2, "501": 1, "503": 1, "none": 3},
        "crashes": 0,
        "seconds": 1.0,
        "trouble": {},
        "peak_mib": {"scheduler": 100},
        "bystander": seen,
    } | changed


@pytest.mark.parametrize(
    ("statuses", "errors"),
    [
        ({"200": 1, "503": 2, "504": 1, "501": 4, "none": 5}, 0),
        ({"500": 3, "503": 2}, 3),
        ({"500": 1, "502": 2, "507": 1}, 4),
    ],
)
def test_internal_errors_are_all_5xx_but_those_given_on_purpose(statuses: dict[str, int], errors: int) -> None:
    (row,) = FUZZ.rows({"points": [{"what": "harm"}, point(by_status=statuses)]})
    assert row["server_errors"] == errors
    assert row["by_status"] == statuses


def test_a_row_has_what_scripts_look_at() -> None:
    (row,) = FUZZ.rows({"points": [point(crashes=1)]})
    assert (row["requests"], row["crashes"], row["slowest_health_check_s"]) == (10, 1, 0.012)
    assert (row["answers_checked"], row["answers_wrong"], row["answers_missing"]) == (40, 0, 0)
    assert any("0.012" in cell for cells in FUZZ.table({"points": [point()]}).rows for cell in cells)


def test_a_run_that_was_stopped_while_its_fleet_started_has_an_empty_table() -> None:
    record: dict[str, Any] = {"points": [], "config": {}}
    assert FUZZ.rows(record) == []
    assert list(FUZZ.table(record).rows) == []
