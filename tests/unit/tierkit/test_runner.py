"""The runner: batches form, answers go to their own request, bounds hold."""

import asyncio
import contextlib
import random
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from itertools import pairwise

import numpy as np
import pytest

from tierkit.errors import (
    DeadlineExceeded,
    Draining,
    InvalidInput,
    Overloaded,
    TooLarge,
    Unavailable,
    UpstreamUnavailable,
)
from tierkit.inference.model import CORES, wanted_s
from tierkit.inference.runner import ModelRunner, RunResult
from tierkit.inference.sharing import ShareTurns
from tierkit.inference.statistics import BatchRecord
from tierkit.inference.thread import InferenceThread
from tierkit.tensors import Array, TensorSpec
from tierkit.testing import wait_for


class Doubler:
    """Returns twice its input, and its negative. `open` is a gate: while it is shut, `run` waits behind it."""

    name = "doubler"
    version = "1"
    platform = "numpy"
    sha256 = "0" * 64
    inputs = (TensorSpec(name="x", datatype="INT64", shape=(-1, 2)),)
    outputs = (
        TensorSpec(name="double", datatype="INT64", shape=(-1, 2)),
        TensorSpec(name="negative", datatype="INT64", shape=(-1, 2)),
    )
    labels: Mapping[str, Sequence[str]] = {}
    parameters: Mapping[str, str | int | float | bool] = {}

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.entered = threading.Semaphore(0)
        self.batches: list[int] = []
        self.asked: list[list[str]] = []

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        self.entered.release()
        assert self.open.wait(20)
        x = inputs["x"]
        if (x == 666).any():
            raise ValueError("this row breaks the model")
        self.batches.append(len(x))
        self.asked.append(list(outputs))
        computed = {"double": 2 * x, "negative": -x}
        return {name: computed[name] for name in outputs}


def rows(*values: int) -> dict[str, Array]:
    return {"x": np.array([[value, value + 1] for value in values], np.int64)}


@contextlib.asynccontextmanager
async def busy(model: Doubler, runner: ModelRunner) -> AsyncIterator[asyncio.Task[RunResult]]:
    """The inference thread is inside the model with one request of value 0; what comes now has to wait."""
    model.open.clear()
    while model.entered.acquire(blocking=False):
        pass
    first = asyncio.create_task(runner.infer(rows(0), ["double"]))
    await asyncio.to_thread(model.entered.acquire)
    try:
        yield first
    finally:
        model.open.set()
        await first


async def queued(runner: ModelRunner, images: int) -> None:
    await wait_for(lambda: runner.queued_images == images, what=f"{images} images in the queue")


async def test_one_request() -> None:
    async with ModelRunner(Doubler()) as runner:
        result = await runner.infer(rows(3, 4), ["double"])
    assert result.outputs["double"].tolist() == [[6, 8], [8, 10]]
    assert list(result.outputs) == ["double"]
    assert result.batch_images == 2
    assert runner.images_done == 2


async def test_without_names_all_outputs_come() -> None:
    async with ModelRunner(Doubler()) as runner:
        assert set((await runner.infer(rows(3))).outputs) == {"double", "negative"}


async def test_waiting_requests_form_a_batch_and_each_gets_its_own_outputs() -> None:
    model = Doubler()
    async with ModelRunner(model) as runner:
        async with busy(model, runner):
            tasks = [asyncio.create_task(runner.infer(rows(value), ["double"])) for value in (10, 20)]
            tasks.append(asyncio.create_task(runner.infer(rows(30, 40), ["negative"])))
            await queued(runner, 4)
        results = await asyncio.gather(*tasks)
    assert model.batches == [1, 4]
    assert model.asked[-1] == ["double", "negative"]
    assert [r.outputs for r in results[:2]] == [
        {"double": pytest.approx(np.array([[20, 22]]))},
        {"double": pytest.approx(np.array([[40, 42]]))},
    ]
    assert results[2].outputs["negative"].tolist() == [[-30, -31], [-40, -41]]
    assert {r.batch_images for r in results} == {4}
    assert all(r.queue_s > 0 for r in results)


async def test_batches_respect_the_maximum_and_large_requests_come_in_pieces() -> None:
    model = Doubler()
    async with ModelRunner(model, max_batch_size=4) as runner:
        async with busy(model, runner):
            sizes = (3, 2, 2, 9, 1)
            tasks = [asyncio.create_task(runner.infer(rows(*range(size)), ["double"])) for size in sizes]
            await queued(runner, sum(sizes))
        results = await asyncio.gather(*tasks)
    assert model.batches == [1, 3, 4, 4, 4, 1, 1]
    for size, result in zip(sizes, results, strict=True):
        assert result.outputs["double"].tolist() == (2 * rows(*range(size))["x"]).tolist()


async def test_a_request_waits_for_company_only_if_told_so() -> None:
    model = Doubler()
    async with ModelRunner(model, max_queue_delay_s=10.0, max_batch_size=3) as runner:
        first = asyncio.create_task(runner.infer(rows(1)))
        await queued(runner, 1)
        await asyncio.gather(first, runner.infer(rows(2)), runner.infer(rows(3)))
    assert model.batches == [3]


async def test_a_batch_starts_in_time_for_the_tightest_budget_in_it() -> None:
    model = Doubler()
    async with ModelRunner(model, max_queue_delay_s=30.0) as runner:
        runner._s_per_image = 0.3
        patient = asyncio.create_task(runner.infer(rows(1)))
        await queued(runner, 1)
        hurried = await runner.infer(rows(2), budget_s=3.0)
        await patient
    assert model.batches == [2]
    # Twice 0.6 s are left for the inference, and nothing is started long before that.
    assert 1.6 < hurried.queue_s < 3.0


async def test_the_runners_own_batches_wait_for_no_company() -> None:
    async with asyncio.timeout(10), ModelRunner(Doubler(), max_queue_delay_s=3600.0) as runner:
        await runner.warm_up()
        runner._last_success = -1e9
        await runner.check()


async def test_a_full_queue_refuses_at_once_and_says_when_to_come_back() -> None:
    model = Doubler()
    async with ModelRunner(model, max_queue_images=3) as runner:
        await runner.warm_up()
        async with busy(model, runner):
            waiting = asyncio.create_task(runner.infer(rows(1, 2)))
            await queued(runner, 2)
            with pytest.raises(Overloaded) as refusal:
                await runner.infer(rows(3, 4))
            assert refusal.value.retry_after_s > 0
            with pytest.raises(Overloaded):
                runner.check_room(2)
        await waiting
        with pytest.raises(TooLarge):
            await runner.infer(rows(1, 2, 3, 4))
        assert runner.statistics.as_json()["inference_stats"]["fail"]["count"] == 3


async def test_cancelling_takes_a_request_out_of_the_queue_and_leaves_its_neighbours() -> None:
    model = Doubler()
    async with ModelRunner(model) as runner:
        async with busy(model, runner):
            tasks = [asyncio.create_task(runner.infer(rows(value), ["double"])) for value in (1, 2, 3)]
            await queued(runner, 3)
            tasks[1].cancel()
            await queued(runner, 2)
        done = await asyncio.gather(*tasks, return_exceptions=True)
    assert model.batches == [1, 2]
    assert isinstance(done[1], asyncio.CancelledError)
    assert [d.outputs["double"][0, 0] for d in (done[0], done[2]) if isinstance(d, RunResult)] == [2, 6]


async def test_a_request_that_breaks_the_model_breaks_only_itself() -> None:
    model = Doubler()
    async with ModelRunner(model) as runner:
        async with busy(model, runner):
            tasks = [asyncio.create_task(runner.infer(rows(value), ["double"])) for value in (1, 666, 3)]
            await queued(runner, 3)
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert (await runner.infer(rows(7), ["double"])).outputs["double"].tolist() == [[14, 16]]
    assert isinstance(done[1], ValueError)
    assert [d.outputs["double"][0, 0] for d in (done[0], done[2]) if isinstance(d, RunResult)] == [2, 6]
    assert runner.statistics.as_json()["inference_stats"]["fail"]["count"] == 1


async def test_a_model_that_loses_rows_is_an_error_and_not_a_shift() -> None:
    class Short(Doubler):
        def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
            return {name: array[:-1] for name, array in super().run(inputs, outputs).items()}

    async with ModelRunner(Short()) as runner:
        with pytest.raises(RuntimeError, match="1 rows for 2 images"):
            await runner.infer(rows(1, 2))


async def test_a_budget_that_cannot_be_met_is_refused_before_the_work() -> None:
    model = Doubler()
    async with ModelRunner(model) as runner:
        await runner.warm_up()
        with pytest.raises(DeadlineExceeded, match="0 ms are left"):
            await runner.infer(rows(1), budget_s=0.0)
        async with busy(model, runner):
            waiting = [asyncio.create_task(runner.infer(rows(*range(200)))) for _ in range(3)]
            await queued(runner, 600)
            enough_for_itself = 10 * runner.ms_per_image / 1000
            with pytest.raises(Overloaded, match="of work wait here"):
                await runner.infer(rows(1), budget_s=enough_for_itself)
            waiting.append(asyncio.create_task(runner.infer(rows(1), budget_s=60.0)))
            await queued(runner, 601)
        await asyncio.gather(*waiting)


async def test_a_budget_spent_in_the_queue_is_an_error_and_costs_no_inference() -> None:
    model = Doubler()
    async with ModelRunner(model) as runner:
        async with busy(model, runner):
            late = asyncio.create_task(runner.infer(rows(1), budget_s=0.01))
            await queued(runner, 1)
            await asyncio.sleep(0.02)  # the budget itself: there is no condition to wait for
        with pytest.raises(DeadlineExceeded, match="while the request waited"):
            await late
    assert model.batches == [1]


async def test_one_slow_batch_does_not_make_an_idle_node_refuse_for_ever() -> None:
    async with ModelRunner(Doubler()) as runner:
        await runner.warm_up()
        runner._s_per_image = 1e6  # as a stall of the machine leaves it
        await runner.infer(rows(1), budget_s=1.0)


@pytest.mark.parametrize(
    ("inputs", "outputs", "says"),
    [
        ({}, (), "takes the inputs"),
        ({"y": rows(1)["x"]}, (), "takes the inputs"),
        (rows(1) | {"y": rows(1)["x"]}, (), "takes the inputs"),
        ({"x": np.zeros((1, 3), np.int64)}, (), r"not INT64 \[1, 3\]"),
        ({"x": np.zeros((1, 2), np.int32)}, (), r"not INT32 \[1, 2\]"),
        ({"x": np.zeros((0, 2), np.int64)}, (), "at least 1"),
        (rows(1), ("triple",), "'triple'"),
    ],
)
async def test_what_does_not_fit_the_model_is_refused(inputs: dict[str, Array], outputs: tuple[str], says: str) -> None:
    async with ModelRunner(Doubler()) as runner:
        with pytest.raises(InvalidInput, match=says):
            await runner.infer(inputs, outputs)


async def test_closing_finishes_the_batch_under_way_and_refuses_the_rest() -> None:
    model = Doubler()
    runner = ModelRunner(model)
    with pytest.raises(Draining):
        await runner.infer(rows(1))
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(runner)
        first = await stack.enter_async_context(busy(model, runner))
        waiting = asyncio.create_task(runner.infer(rows(1)))
        await queued(runner, 1)
        closing = asyncio.create_task(runner.__aexit__(None, None, None))
        with pytest.raises(Draining):
            await waiting
        assert not closing.done()
        model.open.set()
        await closing
        assert (await first).outputs["double"].tolist() == [[0, 2]]
        with pytest.raises(Draining):
            await runner.infer(rows(1))
        stack.pop_all()
    assert "inference" not in {thread.name for thread in threading.enumerate() if thread.is_alive()}


async def test_runners_of_one_thread_take_turns_by_age() -> None:
    thread, one, other = InferenceThread(), Doubler(), Doubler()
    order: list[str] = []
    runners = (
        ModelRunner(one, thread=thread, observe=lambda _record: order.append("one")),
        ModelRunner(other, thread=thread, observe=lambda _record: order.append("other")),
    )
    async with runners[0], runners[1]:
        async with busy(one, runners[0]):
            late = [asyncio.create_task(runners[1].infer(rows(1)))]
            await queued(runners[1], 1)
            late.append(asyncio.create_task(runners[0].infer(rows(2))))
            await queued(runners[0], 1)
            assert thread.backlog_s() >= 0
        await asyncio.gather(*late)
        assert len([t for t in threading.enumerate() if t.name == "inference"]) == 1
    assert order == ["one", "other", "one"]


async def test_warm_up_measures_and_counts_nothing() -> None:
    model = Doubler()
    records: list[BatchRecord] = []
    async with ModelRunner(model, observe=records.append) as runner:
        assert runner.ms_per_image == 0
        await runner.warm_up()
        assert runner.ms_per_image > 0
        assert runner.images_done == 0
        assert records == []
        await runner.infer(rows(1))
        assert len(records) == 1
        model.batches.pop()
    assert model.batches == [1, 1, 50, 50]


async def test_the_check_runs_the_model_when_nothing_else_has_shown_that_it_works() -> None:
    model = Doubler()
    records: list[BatchRecord] = []
    async with ModelRunner(model, observe=records.append) as runner:
        await runner.check()
        await runner.check()
        assert model.batches == [1]
        assert runner.images_computed == 1  # as a heartbeat tells, so that a node without work can show that it works
        # Nobody asked for that image.
        assert (records, runner.images_done, runner.statistics.as_json()["execution_count"]) == ([], 0, 0)
        async with busy(model, runner):
            await runner.check()  # it would wait for ever if it queued behind the batch under way
            assert runner.queued_images == 0


async def test_the_check_finds_a_model_that_fails_or_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Doubler):
        def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
            raise OSError("the device is gone")

    async with ModelRunner(Broken()) as runner:
        with pytest.raises(OSError, match="the device is gone"):
            await runner.check()
        assert runner.statistics.as_json()["inference_stats"]["fail"]["count"] == 0
    monkeypatch.setattr("tierkit.inference.runner._STALL_S", 0.0)
    model = Doubler()
    async with ModelRunner(model) as runner, busy(model, runner):
        with pytest.raises(Unavailable, match="one batch for over"):
            await runner.check()


async def test_statistics_add_up() -> None:
    records: list[BatchRecord] = []
    model = Doubler()
    async with ModelRunner(model, observe=records.append) as runner:
        async with busy(model, runner):
            tasks = [asyncio.create_task(runner.infer(rows(value, value))) for value in (1, 2, 3)]
            await queued(runner, 6)
        await asyncio.gather(*tasks)
    assert [(record.images, len(record.queue_s)) for record in records] == [(1, 1), (6, 3)]
    stats = runner.statistics.as_json()
    assert (stats["inference_count"], stats["execution_count"]) == (7, 2)
    parts = stats["inference_stats"]
    assert {parts[key]["count"] for key in ("success", "queue", "compute_input", "compute_infer")} == {4}
    whole = sum(parts[key]["ns"] for key in ("queue", "compute_input", "compute_infer", "compute_output"))
    assert parts["success"]["ns"] == pytest.approx(whole, abs=10)
    assert [entry["batch_size"] for entry in stats["batch_stats"]] == [1, 6]
    assert all(entry["compute_infer"]["count"] == 1 for entry in stats["batch_stats"])


async def test_a_request_in_pieces_is_several_runs() -> None:
    records: list[BatchRecord] = []
    async with ModelRunner(Doubler(), max_batch_size=4, observe=records.append) as runner:
        result = await runner.infer(rows(*range(10)))
    assert [run.images for run in records[0].runs] == [4, 4, 2]
    assert result.compute_s == records[0].infer_s
    stats = runner.statistics.as_json()
    assert (stats["inference_count"], stats["execution_count"]) == (10, 3)
    assert stats["inference_stats"]["success"]["count"] == stats["inference_stats"]["compute_infer"]["count"] == 1
    sizes = {entry["batch_size"]: entry["compute_infer"]["count"] for entry in stats["batch_stats"]}
    assert sizes == {2: 1, 4: 2}
    by_size = sum(entry["compute_infer"]["ns"] for entry in stats["batch_stats"])
    assert by_size == pytest.approx(stats["inference_stats"]["compute_infer"]["ns"], abs=10)


class Steady(Doubler):
    """A model that may run on the event loop, and tells on which thread it did."""

    steady = True

    def __init__(self) -> None:
        super().__init__()
        self.threads: list[int] = []

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        self.threads.append(threading.get_ident())
        return super().run(inputs, outputs)


@pytest.fixture(params=[False, True], ids=["two cores", "one core"])
def thread(request: pytest.FixtureRequest) -> InferenceThread:
    thread = InferenceThread()
    thread.shares_core = request.param
    return thread


async def warm(runner: ModelRunner, thread: InferenceThread) -> None:
    """Measured, and the inference thread has come to rest."""
    await runner.warm_up()
    await wait_for(lambda: not thread.at_work, what="the inference thread to come to rest")


@pytest.mark.parametrize("alone", [True, False])
async def test_a_short_request_is_computed_on_the_event_loop_if_it_is_alone_or_shares_its_core(
    thread: InferenceThread, alone: bool
) -> None:
    model, records = Steady(), list[BatchRecord]()
    async with ModelRunner(model, thread=thread, observe=records.append) as runner:
        await warm(runner, thread)
        result = await runner.infer(rows(3, 4), ["double"], budget_s=5.0, alone=alone)
        with pytest.raises(ValueError, match="breaks the model"):
            await runner.infer(rows(666), alone=alone)
        with pytest.raises(DeadlineExceeded):
            await runner.infer(rows(1), budget_s=0.0, alone=alone)
        with pytest.raises(InvalidInput):
            await runner.infer({"y": rows(1)["x"]}, alone=alone)
        assert runner.images_done == 2
        assert runner.statistics.as_json()["inference_stats"]["fail"]["count"] == 2
    with pytest.raises(Draining):
        await runner.infer(rows(1), alone=alone)
    assert result.outputs["double"].tolist() == [[6, 8], [8, 10]]
    assert (list(result.outputs), result.batch_images) == (["double"], 2)
    assert [record.images for record in records] == [2]
    assert result.compute_s == records[0].infer_s > 0
    on_loop = alone or thread.shares_core
    assert [ident == threading.get_ident() for ident in model.threads[-2:]] == [on_loop, on_loop]


@pytest.mark.parametrize("why", ["in company", "not steady", "delayed", "never measured", "long", "too many"])
async def test_what_may_take_long_goes_to_the_inference_thread(thread: InferenceThread, why: str) -> None:
    if why == "in company" and thread.shares_core:
        return
    model = Steady()
    model.steady = why != "not steady"
    delay_s = 0.001 if why == "delayed" else 0.0
    async with ModelRunner(model, max_batch_size=8, max_queue_delay_s=delay_s, thread=thread) as runner:
        if why != "never measured":
            await warm(runner, thread)
        if why == "long":
            runner._s_per_image = 0.0201
        await runner.infer(rows(*range(9 if why == "too many" else 1)), ["double"], alone=why != "in company")
    assert threading.get_ident() not in model.threads


async def test_what_takes_a_moment_counts_for_one_core() -> None:
    model, thread = Divided(), InferenceThread(2)
    model.steady = True
    async with divided(model, thread) as runner:
        await warm(runner, thread)
        runner._s_per_image = 0.015  # measured on two cores: 30 ms on one
        await runner.infer(rows(1), ["double"], alone=True)
        assert model.thread != threading.get_ident()
        await wait_for(lambda: not thread.at_work, what="the inference thread to come to rest")
        runner._s_per_image = 0.009
        await runner.infer(rows(1), ["double"], alone=True)
        assert model.thread == threading.get_ident()


async def test_a_short_request_waits_for_the_batch_that_the_thread_computes(thread: InferenceThread) -> None:
    long, short = Doubler(), Steady()
    async with ModelRunner(long, thread=thread) as runner, ModelRunner(short, thread=thread) as other:
        await warm(other, thread)
        async with busy(long, runner):
            behind = asyncio.create_task(other.infer(rows(1), ["double"], alone=True))
            await queued(other, 1)
            for _ in range(10):
                await asyncio.sleep(0)
            assert other.queued_images == 1
        assert (await behind).outputs["double"].tolist() == [[2, 4]]


async def test_on_a_single_core_what_comes_together_is_computed_together() -> None:
    model, thread = Steady(), InferenceThread()
    thread.shares_core = True
    async with ModelRunner(model, thread=thread) as runner:
        await warm(runner, thread)
        values = (1, 2, 666, 4, 5)
        outcomes = await asyncio.gather(*(runner.infer(rows(at), ["double"]) for at in values), return_exceptions=True)
        assert runner.queued_images == runner.running_images == 0
    for value, outcome in zip(values, outcomes, strict=True):
        if value == 666:
            assert isinstance(outcome, ValueError)
        else:
            assert isinstance(outcome, RunResult)
            assert outcome.outputs["double"].tolist() == (2 * rows(value)["x"]).tolist()
    # Once together, in vain, and then each by itself.
    assert len(model.threads[4:]) == 6
    assert set(model.threads[4:]) == {threading.get_ident()}


async def test_between_two_batches_on_the_event_loop_a_short_request_is_answered() -> None:
    class Watched(Steady):
        """Counts the turns that the event loop has made when each batch begins."""

        turns = 0

        def __init__(self) -> None:
            super().__init__()
            self.began: list[int] = []

        def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
            self.began.append(self.turns)
            return super().run(inputs, outputs)

    model, thread = Watched(), InferenceThread()
    thread.shares_core = True
    async with ModelRunner(model, max_batch_size=1, thread=thread) as runner:
        await warm(runner, thread)

        async def turn() -> None:
            while True:
                await asyncio.sleep(0)
                model.turns += 1

        turning = asyncio.create_task(turn())
        await asyncio.gather(*(runner.infer(rows(value), ["double"]) for value in (1, 2, 3)))
        turning.cancel()
    assert set(model.threads[-3:]) == {threading.get_ident()}
    # A connection is taken, its request is read, computed and answered.
    assert [after - before >= 4 for before, after in pairwise(model.began[-3:])] == [True, True]


async def test_each_request_of_a_batch_has_its_own_outcome() -> None:
    model, asked = Doubler(), dict[int, asyncio.Task[RunResult]]()
    async with ModelRunner(model, max_queue_images=4) as runner:

        def ask(value: int, *, urgent: bool = False) -> None:
            asked[value] = asyncio.create_task(runner.infer(rows(value), ["double"], urgent=urgent))

        async with busy(model, runner):
            for value in (1, 666, 3, 4, 5):
                ask(value)
            await queued(runner, 4)
            asked[3].cancel()
            await queued(runner, 3)
        await asyncio.gather(*asked.values(), return_exceptions=True)  # the model has nothing left of these
        async with busy(model, runner):
            ask(6)
            ask(7, urgent=True)
            await queued(runner, 2)
            asked[6].cancel()
        await asyncio.gather(*asked.values(), return_exceptions=True)
        model.open.clear()
        ask(8)
        await wait_for(lambda: runner.running_images == 1, what="the batch of 8")
        ask(9)
        await queued(runner, 1)
        asyncio.get_running_loop().call_soon(model.open.set)
    outcomes = dict(zip(asked, await asyncio.gather(*asked.values(), return_exceptions=True), strict=True))
    assert {value: type(outcome) for value, outcome in outcomes.items()} == {
        1: RunResult,
        666: ValueError,
        3: asyncio.CancelledError,
        4: RunResult,
        5: Overloaded,
        6: asyncio.CancelledError,
        7: RunResult,
        8: RunResult,
        9: Draining,
    }
    for value in (1, 4, 7, 8):
        outcome = outcomes[value]
        assert isinstance(outcome, RunResult)
        assert outcome.outputs["double"].tolist() == (2 * rows(value)["x"]).tolist()


async def test_a_request_cancelled_while_it_is_computed_disturbs_nobody() -> None:
    model = Doubler()
    async with ModelRunner(model) as runner:
        model.open.clear()
        asked = asyncio.create_task(runner.infer(rows(1), ["double"]))
        await asyncio.to_thread(model.entered.acquire)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        model.open.set()
        assert (await runner.infer(rows(2), ["double"])).outputs["double"].tolist() == [[4, 6]]
    assert asked.cancelled()


async def test_thousands_of_interleaved_cancelled_and_failing_requests_never_swap(thread: InferenceThread) -> None:
    dice = random.Random(7)
    answered = 0

    async def one(value: int, runner: ModelRunner, *, within_s: float = 0.2) -> None:
        nonlocal answered
        kind = dice.choice(["plain", "plain", "cancel", "fail"])
        values = [666] if kind == "fail" else [1000 + value * 10 + row for row in range(dice.randint(1, 9))]
        await asyncio.sleep(dice.random() * within_s)
        task = asyncio.create_task(runner.infer(rows(*values), ["double"], alone=dice.random() < 0.5))
        if kind == "cancel":
            await asyncio.sleep(dice.random() * 0.002)
            task.cancel()
        outcome = (await asyncio.gather(task, return_exceptions=True))[0]
        if isinstance(outcome, RunResult):
            assert outcome.outputs["double"].tolist() == (2 * rows(*values)["x"]).tolist()
            answered += 1
        else:
            assert isinstance(outcome, {"fail": ValueError, "cancel": asyncio.CancelledError}.get(kind, ())), outcome

    model = Steady()
    async with ModelRunner(model, max_batch_size=32, max_queue_images=10**6, thread=thread) as runner:
        await warm(runner, thread)
        async with asyncio.TaskGroup() as group:
            for value in range(3000):
                group.create_task(one(value, runner))
        # With less to do the event loop and the thread take turns.
        for value in range(3000, 3400, 2):
            await asyncio.gather(*(one(at, runner, within_s=0.0) for at in (value, value + 1)))
        assert runner.queued_images == 0
    assert answered >= 1500
    assert 0 < model.threads.count(threading.get_ident()) < len(model.threads)


async def test_an_urgent_request_overtakes_those_that_wait_but_not_each_other() -> None:
    model = Doubler()
    order: list[str] = []

    async def ask(runner: ModelRunner, name: str, value: int, *, urgent: bool) -> None:
        await runner.infer(rows(value), ["double"], urgent=urgent)
        order.append(name)

    async with ModelRunner(model, max_batch_size=1) as runner, asyncio.TaskGroup() as group, busy(model, runner):
        waiting = [("batch 1", False), ("batch 2", False), ("urgent 1", True), ("urgent 2", True)]
        for number, (name, urgent) in enumerate(waiting, start=1):
            group.create_task(ask(runner, name, number, urgent=urgent))
            await queued(runner, number)
    assert order == ["urgent 1", "urgent 2", "batch 1", "batch 2"]


async def test_a_request_that_has_waited_long_is_overtaken_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierkit.inference.runner._OVERTAKEN_S", 0.0)
    model = Doubler()
    order: list[bool] = []

    async def ask(runner: ModelRunner, *, urgent: bool) -> None:
        await runner.infer(rows(1), ["double"], urgent=urgent)
        order.append(urgent)

    async with ModelRunner(model, max_batch_size=1) as runner, asyncio.TaskGroup() as group, busy(model, runner):
        for number, urgent in enumerate((False, True), start=1):
            group.create_task(ask(runner, urgent=urgent))
            await queued(runner, number)
    assert order == [False, True]


async def test_what_an_urgent_request_overtakes_does_not_count_against_its_budget() -> None:
    model = Doubler()
    async with ModelRunner(model, max_batch_size=1) as runner, asyncio.TaskGroup() as group:
        runner._s_per_image = 1.0
        async with busy(model, runner):
            for number in range(1, 4):
                group.create_task(runner.infer(rows(number), ["double"]))
                await queued(runner, number)
            with pytest.raises(Overloaded, match="of work wait here"):
                await runner.infer(rows(9), ["double"], budget_s=3.0)
            group.create_task(runner.infer(rows(9), ["double"], budget_s=3.0, urgent=True))
            await queued(runner, 4)


async def test_what_computes_elsewhere_is_asked_once_for_a_batch_that_it_cannot_compute() -> None:
    """Each of the requests might wait as long as the first."""

    class Away(Doubler):
        def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
            answer = super().run(inputs, outputs)
            if inputs["x"].max() > 2:
                raise UpstreamUnavailable("it is away", retry_after_s=7.0)
            return answer

    model = Away()
    async with ModelRunner(model) as runner, busy(model, runner):
        model.batches.clear()
        asked = [asyncio.create_task(runner.infer(rows(value))) for value in (2, 3, 4)]
        await wait_for(lambda: runner.queued_images == 3)
        model.open.set()
        outcomes = await asyncio.gather(*asked, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [UpstreamUnavailable] * 3
    assert model.batches == [1, 3]
    assert runner.statistics.as_json()["inference_stats"]["fail"]["count"] == 3


async def test_a_model_that_is_computed_elsewhere_is_not_served_while_that_is_away() -> None:
    trouble = ["it is away"]
    async with ModelRunner(Doubler(), trouble=lambda: trouble[0]) as runner:
        for refused in (runner.check(), runner.infer(rows(1))):
            with pytest.raises(Unavailable, match="it is away"):
                await refused
        trouble[0] = ""
        await runner.infer(rows(1))
        await runner.pause("an operator says so")
        trouble[0] = "it is away"
        runner.paused = ""
        assert runner.not_served == "it is away"


async def test_what_is_computed_elsewhere_is_waited_for_no_longer_than_a_budget() -> None:
    waits: list[float] = []

    class Patient(Doubler):
        def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
            waits.append(wanted_s(30.0))
            return super().run(inputs, outputs)

    model = Patient()
    async with ModelRunner(model, elsewhere=True) as runner:
        async with busy(model, runner):
            short, long = (asyncio.create_task(runner.infer(rows(1), budget_s=budget_s)) for budget_s in (0.05, 20.0))
            with pytest.raises(DeadlineExceeded):
                await short
            assert runner.queued_images == 1
        await long
        assert waits[0] == 30.0  # nobody has set a limit
        assert 0 < waits[1] <= 20.0
        model.open.clear()
        first = asyncio.create_task(runner.infer(rows(2), budget_s=0.05))
        with pytest.raises(DeadlineExceeded):
            await first
        assert runner.running_images == 1
        model.open.set()


class Divided(Doubler):
    """Computes on two cores; notes the cores of each batch, and how many cores are used at a time."""

    threads = 2
    steady = False

    def __init__(self) -> None:
        super().__init__()
        self.thread = 0
        self.cores: dict[int, int] = {}
        """By the first value of a batch."""
        self.lock = threading.Lock()
        self.running = self.used = self.most_cores = 0

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        cores, self.thread = CORES.get(), threading.get_ident()
        with self.lock:
            self.cores[int(inputs["x"][0, 0])] = cores
            self.running += 1
            self.used += cores
            self.most_cores = max(self.most_cores, self.used)
        try:
            return super().run(inputs, outputs)
        finally:
            with self.lock:
                self.running -= 1
                self.used -= cores


def divided(model: Doubler, thread: InferenceThread) -> ModelRunner:
    return ModelRunner(model, max_batch_size=2, thread=thread)


async def test_a_batch_has_all_cores_and_several_that_wait_have_one_each() -> None:
    model, thread = Divided(), InferenceThread(2)
    async with divided(model, thread) as runner:
        async with busy(model, runner):
            tasks = [asyncio.create_task(runner.infer(rows(value, 0), ["double"])) for value in (10, 20, 30)]
            await queued(runner, 6)
            assert model.running == 1  # the first one has all cores
        results = await asyncio.gather(*tasks)
        await wait_for(lambda: not thread.at_work)
        await runner.infer(rows(40), ["double"])
    assert [result.outputs["double"][0].tolist() for result in results] == [[20, 22], [40, 42], [60, 62]]
    assert (model.cores[0], model.cores[10], model.cores[20], model.cores[40]) == (2, 1, 1, 2)
    assert model.most_cores == 2


async def test_two_batches_run_at_the_same_time() -> None:
    model, thread, met = Divided(), InferenceThread(2), threading.Barrier(2, timeout=20)
    compute = model.run

    def run(inputs: Mapping[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        if inputs["x"][0, 0] in (10, 20):
            met.wait()
        return compute(inputs, outputs)

    model.run = run  # type: ignore[method-assign]
    async with divided(model, thread) as runner:
        async with busy(model, runner):
            tasks = [asyncio.create_task(runner.infer(rows(value, 0), ["double"])) for value in (10, 20)]
            await queued(runner, 4)
        results = await asyncio.gather(*tasks)
    # Of the time of a batch that has one core of two, half counts as waiting.
    assert all(result.queue_s >= result.compute_s > 0 for result in results)


async def test_a_pause_waits_for_all_batches() -> None:
    model, thread = Divided(), InferenceThread(2)
    async with divided(model, thread) as runner:
        model.open.clear()
        tasks = [asyncio.create_task(runner.infer(rows(value, 0), ["double"])) for value in (1, 2, 3)]
        await asyncio.to_thread(model.entered.acquire)
        pausing = asyncio.create_task(runner.pause("an operator has unloaded it"))
        model.open.set()
        await pausing
        assert (model.running, runner.running_images, runner.queued_images) == (0, 0, 0)
        assert [len((await task).outputs["double"]) for task in tasks] == [2, 2, 2]


async def test_a_model_that_cannot_be_divided_never_shares_the_cores() -> None:
    one, other, thread = Divided(), Doubler(), InferenceThread(2)
    compute = other.run

    def run(inputs: Mapping[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        shared.append(one.running > 0)
        return compute(inputs, outputs)

    shared: list[bool] = []
    other.run = run  # type: ignore[method-assign]
    async with divided(one, thread) as runner, divided(other, thread) as beside:
        asked = [
            asyncio.create_task((beside if value % 3 == 0 else runner).infer(rows(value, 0), ["double"]))
            for value in range(60)
        ]
        results = await asyncio.gather(*asked)
    assert [result.outputs["double"][0, 0] for result in results] == [2 * value for value in range(60)]
    assert shared == [False] * len(shared)
    assert one.most_cores <= 2


async def test_a_row_that_breaks_a_batch_of_several_cores_breaks_only_itself() -> None:
    model, thread = Divided(), InferenceThread(2)
    async with divided(model, thread) as runner:
        async with busy(model, runner):
            tasks = [asyncio.create_task(runner.infer(rows(value), ["double"])) for value in (666, 1, 666, 2)]
            await queued(runner, 4)
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [ValueError, RunResult, ValueError, RunResult]
        await wait_for(lambda: not thread.at_work, what="the inference threads to come to rest")
        assert runner.running_images == 0


# --- several schedulers ---


@contextlib.asynccontextmanager
async def serving_two(
    model: Doubler, *, max_batch_size: int = 64, max_queue_images: int = 4096
) -> AsyncIterator[ModelRunner]:
    thread = InferenceThread(turns=ShareTurns(["a", "b"]))
    async with ModelRunner(
        model, thread=thread, max_batch_size=max_batch_size, max_queue_images=max_queue_images
    ) as runner:
        yield runner


def ask(runner: ModelRunner, share: str, value: int, *, budget_s: float | None = None) -> asyncio.Task[RunResult]:
    return asyncio.create_task(runner.answer(rows(value), ["double"], 1, share=share, budget_s=budget_s))


def note(task: asyncio.Task[RunResult], share: str, ended: list[str]) -> None:
    task.add_done_callback(lambda _: ended.append(share))


async def test_schedulers_take_turns_and_a_batch_mixes_their_requests() -> None:
    model = Doubler()
    ended: list[str] = []
    async with serving_two(model, max_batch_size=2) as runner:
        async with busy(model, runner):
            runner._s_per_image = 1.0
            tasks = []
            for share in "aaaaaabb":
                tasks.append(ask(runner, share, 1))
                note(tasks[-1], share, ended)
            await queued(runner, 8)
            assert [runner.queued_images_of(share) for share in "ab"] == [6, 2]
        await asyncio.gather(*tasks)
        assert model.batches == [1, 2, 2, 2, 2]
        assert [set(ended[at : at + 2]) for at in (0, 2)] == [{"a", "b"}, {"a", "b"}]
        assert runner.answered_images == {"a": 6, "b": 2, "": 1}


async def test_a_flood_makes_the_node_refuse_nobody_else() -> None:
    model = Doubler()
    async with serving_two(model, max_queue_images=6) as runner, busy(model, runner):
        flood = [ask(runner, "a", value) for value in range(6)]
        await queued(runner, 6)
        for share in ("a", ""):
            runner.check_room(2, share="b")
            with pytest.raises(Overloaded):
                runner.check_room(3, share=share)
        own = [ask(runner, "b", value) for value in range(2)]
        await queued(runner, 8)
        with pytest.raises(Overloaded):
            runner.check_room(1, share="b")
        assert runner.refused_requests == {"a": 1, "b": 1, "": 1}
        model.open.set()
        await asyncio.gather(*flood, *own)


async def test_work_of_others_counts_against_a_budget_only_as_far_as_it_comes_first() -> None:
    model = Doubler()
    async with serving_two(model) as runner, busy(model, runner):
        runner._s_per_image = 1.0
        flood = [ask(runner, "a", value) for value in range(50)]
        await queued(runner, 50)
        with pytest.raises(Overloaded, match="about 51"):
            await runner.answer(rows(1), ["double"], 1, budget_s=20.0, share="a")
        own = ask(runner, "b", 1, budget_s=20.0)  # one of the flood comes before it
        await queued(runner, 51)
        with pytest.raises(Overloaded, match="about 3000 ms"):
            await runner.answer(rows(1), ["double"], 1, budget_s=2.5, share="")
        model.open.set()
        await asyncio.gather(*flood, own)


async def test_two_models_of_a_node_are_served_in_turns() -> None:
    one, two = Doubler(), Doubler()
    thread = InferenceThread(turns=ShareTurns(["a", "b"]))
    ended: list[str] = []
    async with (
        ModelRunner(one, thread=thread, max_batch_size=1) as first,
        ModelRunner(two, thread=thread, max_batch_size=1) as second,
        busy(one, first),
    ):
        tasks = [ask(first, "a", value) for value in range(6)] + [ask(second, "b", value) for value in range(2)]
        for task, share in zip(tasks, "aaaaaabb", strict=True):
            note(task, share, ended)
        await queued(first, 6)
        await queued(second, 2)
        first._s_per_image = second._s_per_image = 1.0
        one.open.set()
        await asyncio.gather(*tasks)
    assert "".join(ended).rindex("b") <= 4  # by age, all of the flood would come first
