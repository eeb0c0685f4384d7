"""The network of a tier that a machine can carry."""

import pytest
from hypothesis import given, strategies as st

from models.fitting import Capacity, judge, last_resort, left_out, needs_bytes, to_measure
from models.manifest import Costs, Manifest, ModelEntry


def entry(name: str, *, mb: float = 1, accuracy: float | None = 0.5, **changes: object) -> ModelEntry:
    facts = {
        "name": name,
        "tier": "end",
        "file": f"{name}.onnx",
        "sha256": "0" * 64,
        "size_bytes": int(mb * 1e6),
        "costs": Costs(macs=1, peak_bytes=int(mb * 1e6)),
        "target": "fine",
        "classes": 3,
        "input_shape": (32, 32, 3),
        "precision": "int8",
        "parameters": 1,
        "temperature": 1.0,
        "coarse_accuracy": accuracy,
        "fine_accuracy": accuracy,
        "test_images": 1,
        "ece_before": None,
        "ece_after": None,
        "feature_shape": None,
        "head_parameters": None,
        "training": None,
    }
    return ModelEntry.model_validate(facts | changes)


SMALL, MIDDLE, LARGE = (
    entry(name, mb=mb, accuracy=accuracy) for name, mb, accuracy in (("s", 1, 0.6), ("m", 10, 0.7), ("l", 100, 0.8))
)
ALL = (SMALL, MIDDLE, LARGE)


def free(mb: float | None) -> int | None:
    return None if mb is None else int(mb * 1e6)


@pytest.mark.parametrize(
    ("free_mb", "within_ms", "ms", "outcomes"),
    [
        (1000, None, {}, {"s": "fits", "m": "fits", "l": "chosen"}),
        (None, None, {}, {"s": "fits", "m": "fits", "l": "chosen"}),
        (429, None, {}, {"s": "fits", "m": "chosen", "l": "too large"}),
        (35, None, {}, {"s": "chosen", "m": "too large", "l": "too large"}),
        (10, None, {}, {"s": "too large", "m": "too large", "l": "too large"}),
        (1000, 100, {"s": 1, "m": 100, "l": 101}, {"s": "fits", "m": "chosen", "l": "too slow"}),
        (1000, 100, {"s": 101, "m": 102, "l": 103}, {"s": "too slow", "m": "too slow", "l": "too slow"}),
        (35, 100, {"s": 101, "m": 1, "l": 1}, {"s": "too slow", "m": "too large", "l": "too large"}),
        (1000, None, {"l": 1e6}, {"s": "fits", "m": "fits", "l": "chosen"}),
    ],
)
def test_the_best_that_fits_memory_and_time_is_chosen(free_mb, within_ms, ms, outcomes) -> None:
    judged = judge(ALL, Capacity(free_bytes=free(free_mb), within_ms=within_ms), ms)
    assert {each.name: each.outcome for each in judged} == outcomes
    assert all(each.reason for each in judged)


def test_accuracies_of_other_classes_do_not_compare() -> None:
    capacity = Capacity(free_bytes=None, within_ms=None)
    coarse = entry("coarse", target="coarse", coarse_accuracy=0.7, fine_accuracy=None)
    fine = entry("fine", coarse_accuracy=0.75, fine_accuracy=0.6)
    assert [each.outcome for each in judge((coarse, fine), capacity, {})] == ["fits", "chosen"]
    # Without a measurement the size decides.
    unknown = entry("unknown", accuracy=None, parameters=10**9)
    assert [each.outcome for each in judge((LARGE, unknown), capacity, {})] == ["fits", "chosen"]
    # Of equals, the set's own order decides.
    assert [each.outcome for each in judge((entry("a"), entry("b")), capacity, {})] == ["chosen", "fits"]


def test_only_speeds_that_decide_are_measured() -> None:
    limited = Capacity(free_bytes=free(1000), within_ms=100)
    assert to_measure(ALL, limited, {}) == LARGE
    assert to_measure(ALL, limited, {"l": 50}) is None
    assert to_measure(ALL, limited, {"l": 150}) == MIDDLE
    # One that is left is served at any speed.
    assert to_measure(ALL, limited, {"l": 150, "m": 150}) is None
    assert to_measure(ALL, Capacity(free_bytes=free(1000), within_ms=None), {}) is None
    assert to_measure(ALL, Capacity(free_bytes=free(35), within_ms=100), {}) is None


def test_intermediate_values_count_for_each_image_of_a_task() -> None:
    wide = entry("wide", accuracy=0.9, size_bytes=8_000_000, costs=Costs(macs=1, peak_bytes=142_000_000))
    assert needs_bytes(wide) == 30_000_000 + 4 * 8_000_000 + 50 * 134_000_000
    judged = judge((LARGE, wide), Capacity(free_bytes=free(1000), within_ms=None), {})
    assert [each.outcome for each in judged] == ["chosen", "too large"]
    assert needs_bytes(entry("unknown", mb=10, costs=None)) == 30_000_000 + 4 * 10_000_000


def test_the_least_is_served_where_none_suits() -> None:
    slow = judge(ALL, Capacity(free_bytes=free(100), within_ms=1), {"s": 20, "m": 10})
    assert last_resort(slow).name == "m"
    assert last_resort(judge(ALL, Capacity(free_bytes=1, within_ms=None), {})).name == "s"


def test_networks_that_are_no_candidates_have_a_reason() -> None:
    gpu, tuned = entry("g", gpu=True), entry("t")
    manifest = Manifest(hierarchy={}, data_source="", models=(SMALL, gpu, tuned), tuned=("t",))
    candidates = manifest.candidates("end")
    assert candidates == (tuned,)
    assert {each.name: each.reason for each in left_out(manifest.models, candidates)} == {
        "s": "the thresholds of escalation are tuned for t",
        "g": "for nodes with a GPU",
    }
    assert manifest.candidates("end", gpu=True) == (gpu,)


@given(
    st.lists(st.tuples(st.integers(1, 500), st.floats(0, 1)), min_size=1, max_size=6),
    st.integers(1, 3000),
    st.one_of(st.none(), st.floats(1, 100)),
    st.lists(st.floats(0.1, 200), min_size=6, max_size=6),
)
def test_what_is_chosen_fits_and_no_better_one_does(sizes, free_mb, within_ms, paces) -> None:
    entries = [entry(f"n{at}", mb=mb, accuracy=accuracy) for at, (mb, accuracy) in enumerate(sizes)]
    capacity = Capacity(free_bytes=free(free_mb), within_ms=within_ms)
    ms = {each.name: pace for each, pace in zip(entries, paces, strict=False)}
    able = [
        each
        for each in entries
        if needs_bytes(each) <= free_mb * 1e6 and (within_ms is None or ms[each.name] <= within_ms)
    ]
    chosen = [each.name for each in judge(entries, capacity, ms) if each.outcome == "chosen"]
    assert len(chosen) == bool(able)
    if able:
        accuracy = {f"n{at}": accuracy for at, (_, accuracy) in enumerate(sizes)}
        assert accuracy[chosen[0]] == max(accuracy[each.name] for each in able)
    # Measuring only what decides leads to the same network.
    known: dict[str, float] = {}
    while (next_one := to_measure(entries, capacity, known)) is not None:
        known[next_one.name] = ms[next_one.name]
    lazily = [each.name for each in judge(entries, capacity, known) if each.outcome == "chosen"]
    fitting = [each for each in entries if needs_bytes(each) <= free_mb * 1e6]
    assert lazily == chosen or (not chosen and len(lazily) == 1 and len(fitting) > 0)
