"""What people see: numbers in the right places, nothing lost in a narrow terminal."""

import io
import json
import re
import sys
from datetime import UTC, datetime

import numpy as np
import pytest
from rich.console import Console, RenderableType

from models.data import ImageSet
from models.hierarchy import Hierarchy
from models.manifest import load_manifest
from terrace import console as console_module
from terrace.cli import run
from terrace.commands.classify import answers_table
from terrace.commands.jobs import _event_json, _event_lines, _lines
from terrace.console import Column, Listing, image_count, milliseconds, node_order, percent, progress_bars
from terrace.demo_screen import DemoScreen
from terrace.loglines import LogPainter
from terrace.report import job_summary, tier_networks
from tierkit.client import (
    Attempt,
    AttemptPage,
    Client,
    CoarseAnswer,
    CoarseResults,
    FailedResults,
    FineAnswer,
    FineResults,
    ImageResult,
    Job,
    JobState,
    NodeShare,
    StateChange,
)
from tierkit.types import Scheme, Tier
from tierkit.wire.api import SentShare

HIERARCHY = Hierarchy(name="x", fine=("ray", "sea"), coarse=("fish", "large_natural_outdoor_scenes"), parent=(0, 1))


def seen(view: RenderableType, *, width: int = 100) -> str:
    console = Console(width=width, no_color=True)
    with console.capture() as capture:
        console.print(view)
    return capture.get()


def result(index: int, *, coarse: int, fine: int | None = None) -> ImageResult:
    answer = None
    if fine is not None:
        answer = FineAnswer(
            index=fine,
            label=HIERARCHY.fine[fine],
            confidence=0.9,
            coarse_index=0,
            coarse_label="fish",
            node="edge-1",
            tier=Tier.EDGE,
            ms=1234.5,
        )
    label = HIERARCHY.coarse[coarse]
    first = CoarseAnswer(index=coarse, label=label, confidence=0.5, node="end-1", ms=12.34)
    return ImageResult(index=index, coarse=first, fine=answer)


@pytest.fixture
def screen() -> DemoScreen:
    sample = ImageSet(
        images=np.zeros((2, 1, 1, 3), np.uint8), fine=np.array([0, 1]), coarse=None, names=(), hierarchy_name="x"
    )
    return DemoScreen(sample, HIERARCHY, ready_s=1.25)


def test_answers_appear_as_they_arrive(screen: DemoScreen) -> None:
    assert "0/2" in seen(screen)
    screen.take(CoarseResults(results=(result(0, coarse=0), result(1, coarse=0))))
    text = seen(screen)
    assert "2/2" in text
    assert "✓ fish" in text
    assert "✗ fish" in text
    assert "12.3 ms" in text
    screen.take(FineResults(results=(result(1, coarse=0, fine=1),)))
    (line,) = [line for line in seen(screen).splitlines() if line.startswith("sea")]
    assert line.split() == ["sea", "✗", "fish", "12.3", "ms", "✓", "sea", "1,234", "ms", "edge-1"]


def test_answers_of_other_classes_than_the_sample_s_are_not_judged() -> None:
    sample = ImageSet(
        images=np.zeros((1, 1, 1, 3), np.uint8), fine=np.array([1]), coarse=None, names=(), hierarchy_name="x"
    )
    screen = DemoScreen(sample, HIERARCHY, known=False, ready_s=1.25)
    screen.take(CoarseResults(results=(result(0, coarse=0),)))
    (line,) = [line for line in seen(screen).splitlines() if line.startswith("sea")]
    assert line.split()[:2] == ["sea", "fish"]


def test_without_superclasses_answers_are_the_first_and_the_upper_ones() -> None:
    job = Job(
        id="j1",
        state=JobState.COMPLETED,
        scheme=Scheme.MAPPING,
        images=3,
        tasks=1,
        answered_coarse=3,
        answered_fine=2,
        fallback=1,
        coarse_accuracy=0.5,
        coarse_from_fine_accuracy=0.9,
        flat=True,
        by_node={"end-1": NodeShare(tier=Tier.END, coarse_images=3)},
    )
    text = seen(job_summary(job))
    assert "1 with the first answer standing" in text
    assert "coarse" not in text
    assert "fine" not in text
    table = seen(answers_table([result(0, coarse=0), result(1, coarse=0, fine=1)], flat=True))
    assert [line.split()[:2] for line in table.splitlines()[2:]] == [["0", "fish"], ["1", "sea"]]


@pytest.mark.parametrize("width", [40, 80, 100, 200])
def test_a_line_is_a_line_in_any_terminal(screen: DemoScreen, width: int) -> None:
    screen.take(FineResults(results=(result(0, coarse=1, fine=0), result(1, coarse=1, fine=1))))
    lines = seen(screen, width=width).splitlines()
    assert max(map(len, lines)) <= width
    assert sum("✓ sea" in line for line in lines) == 1
    assert sum("edge-1" in line for line in lines) == (2 if width >= 80 else 0)
    (headings,) = [line for line in lines if "coarse  " in line and "fine" in line]
    assert set(headings.split()) <= {"an", "image", "of", "coarse", "after", "fine", "by"}


LISTING = Listing(Column(title="id"), Column(title="name", rank=2, max_width=8), Column(title="url", rank=1))
LISTING.add_row("0192f3a4b5c6d7e8f901", "a long and telling name", "http://10.0.0.7:8070")


@pytest.mark.parametrize(
    ("width", "cells"),
    [
        (80, ["0192f3a4b5c6d7e8f901", "a long …", "http://10.0.0.7:8070"]),
        (45, ["0192f3a4b5c6d7e8f901", "http://10.0.0.7:8070"]),
        (30, ["0192f3a4b5c6d7e8f901"]),
        (10, ["0192f3a4b5c6d7e8f901"]),
        (10_000, ["0192f3a4b5c6d7e8f901", "a long and telling name", "http://10.0.0.7:8070"]),
    ],
)
def test_a_listing_never_breaks_an_id(width: int, cells: list[str]) -> None:
    console = Console(width=width, no_color=True)
    with console.capture() as capture:
        console.print(LISTING, crop=False)
    assert re.split(" {2,}", capture.get().splitlines()[-1].strip()) == cells


TELLING = "earliest finish, end-1 and edge-1 after 0.31 s in its queue: answer in 0.92 s"
EXPLAINED = Listing(
    Column(title="task", right=True), Column(title="outcome", rank=1), Column(title="why", least=30), Column(title="id")
)
EXPLAINED.add_row("7", "rerouted", TELLING, "end-1")


@pytest.mark.parametrize(
    ("width", "outcome", "whole"), [(120, True, True), (80, True, False), (50, False, False), (10_000, True, True)]
)
def test_one_column_takes_what_the_others_leave(width: int, outcome: bool, whole: bool) -> None:
    console = Console(width=width, no_color=True)
    with console.capture() as capture:
        console.print(EXPLAINED, crop=False)
    lines = capture.get().splitlines()
    cells = re.split(" {2,}", lines[2].strip())
    assert ("rerouted" in cells) == outcome
    assert cells[-1] == "end-1"
    if whole:
        assert cells[-2] == TELLING
        assert len(lines) == 3
        return
    assert max(map(len, lines)) <= width
    assert " ".join([cells[-2], *(line.strip() for line in lines[3:])]) == TELLING, "it goes on below"


def test_the_reason_of_an_attempt_costs_no_other_column(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = "end-2 sent an invalid line (Input should be an object)"
    attempt = Attempt(
        task=7,
        attempt=1,
        first_image=0,
        images=50,
        node="end-2",
        incarnation="x",
        tier=Tier.END,
        upstream="edge-1",
        stage="all",
        hedge=False,
        outcome="error",
        reason=reason,
        started_at=datetime.now(UTC),
        ended_at=None,
        ms=1234.5,
    )
    monkeypatch.setattr(Client, "attempts", lambda *_, **__: AttemptPage(attempts=(attempt,), next_cursor=None))
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["jobs", "attempts", "j1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["task", "attempt", "node", "upstream", "stage", "outcome", "ms", "reason"]
    cells = lines[2].split(maxsplit=7)
    assert cells[:7] == ["7", "1", "end-2", "edge-1", "all", "error", "1,234.5"]
    assert " ".join([cells[7].strip(), *(line.strip() for line in lines[3:])]) == reason
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("width", [20, 80])
def test_a_listing_without_rows_and_with_an_empty_title(width: int) -> None:
    nothing = Listing(Column(title="", least=24), Column(title="counted", least=24))
    output = io.StringIO()
    Console(file=output, width=width).print(nothing)
    assert "counted" in output.getvalue()


def test_a_pipe_has_no_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert console_module.screen().width == 10_000
    monkeypatch.setenv("COLUMNS", "40")
    assert console_module.screen().width == 40


def test_a_job_in_short() -> None:
    job = Job(
        id="j1",
        state=JobState.COMPLETED,
        scheme=Scheme.MAPPING,
        images=300,
        tasks=6,
        answered_coarse=300,
        answered_fine=290,
        fallback=10,
        elapsed_s=4.0,
        images_per_s=75.0,
        coarse_accuracy=0.5,
        fine_accuracy=0.75,
        by_node={
            "cloud-1": NodeShare(tier=Tier.CLOUD, fine_images=290),
            "end-1": NodeShare(tier=Tier.END, coarse_images=300),
        },
        mapping={"end-1": "cloud-1"},
    )
    text = seen(job_summary(job))
    for words in ("300 images in 4.00 s, 75.0 images/s", "completed", "10 with the coarse answer standing", "50.0 %"):
        assert words in text
    assert text.index("end-1 ") < text.index("cloud-1 "), "from the bottom of the tiers to the top"
    assert "end-1 → cloud-1" in text
    # The scheme adaptive has no mapping: the last ways of its tasks would be taken for one.
    assert "→" not in seen(job_summary(job.model_copy(update={"scheme": Scheme.ADAPTIVE})))


def test_a_job_shows_what_its_features_cost() -> None:
    sent = {
        "pixels": SentShare(tasks=3, upload_bytes=460_000),
        "bottleneck": SentShare(tasks=4, upload_bytes=80_000, encode_ms=74.0),
    }
    job = Job(id="j1", state=JobState.COMPLETED, scheme=Scheme.END_CLOUD, images=350, tasks=7)
    assert "encoded" not in seen(job_summary(job.model_copy(update={"sent": {"pixels": sent["pixels"]}})))
    (line,) = [
        line for line in seen(job_summary(job.model_copy(update={"sent": sent}))).splitlines() if "encoded" in line
    ]
    assert "bottleneck 20.0 kB and 18.5 ms a task" in line
    assert "pixels" not in line


def test_a_job_that_has_just_begun() -> None:
    text = seen(
        job_summary(Job(id="j1", state=JobState.QUEUED, scheme=Scheme.END, images=1, tasks=1, reason="no node"))
    )
    assert "queued: no node" in text
    assert "-" in text


def test_nodes_are_counted_as_people_do() -> None:
    nodes = [(Tier.CLOUD, "cloud-1"), (Tier.END, "end-10"), (Tier.END, "end-2"), (Tier.EDGE, "a"), (Tier.END, "end")]
    found = [name for _, name in sorted(nodes, key=lambda node: node_order(*node))]
    assert found == ["end", "end-2", "end-10", "a", "cloud-1"]


def test_numbers() -> None:
    assert [milliseconds(value) for value in (None, 0.04, 99.94, 1234.5)] == ["-", "0.0 ms", "99.9 ms", "1,234 ms"]
    assert [percent(value) for value in (None, 0.0, 0.4567)] == ["-", "0.0 %", "45.7 %"]


EVIL = "\x1b]0;owned\x07\x1b[2J\x9b1mname\u202e\rgone"


def assert_harmless(text: str) -> None:
    assert all(character.isprintable() or character in "\n" for character in text)


def test_nothing_from_outside_commands_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    job = Job(id="x", state=JobState.FAILED, images=1, tasks=1, scheme=Scheme.END, name=EVIL, reason=EVIL)
    named = ImageResult(index=0, name=EVIL, error=EVIL)
    for view in (job_summary(job), answers_table([named]), LogPainter({}).paint("x", json.dumps({"message": EVIL}))):
        console_module.screen().print(view)
    console_module.screen().out(EVIL)
    console_module.print_json(job)
    for event in (StateChange(job=job), FailedResults(results=(named,))):
        sys.stdout.writelines([_event_json(event), *_event_lines(event)])
    printed = capsys.readouterr().out
    assert_harmless(printed)
    assert "\\u001b[2J" in printed
    assert json.loads(_event_json(StateChange(job=job)))["data"]["name"] == EVIL


def test_a_name_with_a_line_break_makes_no_second_row() -> None:
    table = Listing(Column(title="name"))
    table.add_row("one\ntwo")
    assert "one\\ntwo" in seen(table)


@pytest.mark.parametrize("width", [40, 120])
def test_the_only_answer_is_never_left_out(width: int) -> None:
    text = seen(answers_table([result(0, coarse=1), result(1, coarse=0)]), width=width)
    assert "fish" in text
    assert "large_natural" in text


def test_lines_of_results_come_whole_whatever_the_pieces() -> None:
    assert list(_lines([b"a\r\nb\xc3", b"\xa4c", b"\nd"])) == ["a", "b\xe4c", "d"]


def test_one_is_an_image() -> None:
    assert [image_count(count) for count in (0, 1, 2000)] == ["0 images", "1 image", "2,000 images"]


def test_a_scheduler_at_an_ipv6_address_is_named_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Client, "devices", lambda self, **_: [])
    assert run(["devices", "list", "--scheduler", "http://[fe80::1]:8070"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("terrace end --scheduler http://[fe80::1]:8070")


def test_what_a_bar_counts_is_no_markup() -> None:
    progress = progress_bars("step")
    progress.add_task("run[/red][bold]1", total=2)
    shown = Console(file=io.StringIO(), width=80)
    shown.print(progress.get_renderable())
    assert isinstance(shown.file, io.StringIO)
    assert shown.file.getvalue().startswith("run[/red][bold]1 ")


def test_each_tier_is_shown_with_what_it_serves_and_how_often_that_is_right() -> None:
    manifest = load_manifest()
    shown = seen(tier_networks(manifest, Tier)).splitlines()
    assert [line.split()[:2] for line in shown] == [[tier, manifest.default_for(tier).name] for tier in Tier]
    assert all(percent(manifest.default_for(tier).accuracy) in line for tier, line in zip(Tier, shown, strict=True))


def test_of_a_network_without_an_accuracy_nothing_is_said_of_right_and_wrong() -> None:
    manifest = load_manifest()
    none = {"coarse_accuracy": None, "fine_accuracy": None}
    models = tuple(entry.model_copy(update=none) for entry in manifest.models)
    (line,) = seen(tier_networks(manifest.model_copy(update={"models": models}), [Tier.CLOUD])).splitlines()
    assert line.split()[-2:] == ["100", "classes"]


def test_of_a_tier_that_gets_features_the_tail_is_shown() -> None:
    encoder = load_manifest().encoder("resnet-34.bottleneck")
    (edge,) = seen(tier_networks(load_manifest(), [Tier.EDGE], [Tier.EDGE])).splitlines()
    assert encoder.name in edge
    assert percent(encoder.fine_accuracy) in edge
