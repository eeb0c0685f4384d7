"""State of a service and the loops that it owns."""

import asyncio

from tierkit.http.lifecycle import Lifecycle


async def test_it_goes_from_starting_to_ready_to_draining() -> None:
    lifecycle = Lifecycle()
    assert (lifecycle.ready, lifecycle.draining) == (False, False)
    lifecycle.set_ready()
    await lifecycle.wait_ready()
    lifecycle.drain()
    lifecycle.drain()
    await lifecycle.wait_draining()
    assert (lifecycle.ready, lifecycle.draining) == (True, True)


async def test_idle_is_when_the_last_request_has_ended() -> None:
    lifecycle = Lifecycle()
    await lifecycle.wait_idle()
    with lifecycle.working():
        with lifecycle.working():
            assert lifecycle.in_flight == 2
        idle = asyncio.create_task(lifecycle.wait_idle())
        await asyncio.wait({idle}, timeout=0.01)
        assert not idle.done()
    await idle
    assert lifecycle.in_flight == 0


async def test_a_loop_that_crashes_drains_the_service_and_the_first_crash_counts() -> None:
    lifecycle = Lifecycle()
    go = asyncio.Event()

    async def crash(error: Exception, wait: bool) -> None:
        if wait:
            await go.wait()
        raise error

    first = lifecycle.own(crash(ValueError("first"), wait=False), name="first")
    second = lifecycle.own(crash(KeyError("second"), wait=True), name="second")
    await asyncio.wait({first})
    go.set()
    await lifecycle.wait_draining()
    await asyncio.wait({second})
    assert isinstance(lifecycle.crash, ValueError)


async def test_a_loop_that_ends_or_is_cancelled_is_no_crash() -> None:
    lifecycle = Lifecycle()

    async def end() -> None:
        return

    async def go_on() -> None:
        await asyncio.Event().wait()

    await lifecycle.own(end(), name="end")
    task = lifecycle.own(go_on(), name="go on")
    await lifecycle.cancel_owned()
    assert task.cancelled()
    assert lifecycle.crash is None
    assert not lifecycle.draining


async def test_a_check_that_fails_says_why() -> None:
    lifecycle = Lifecycle()

    async def fine() -> None: ...

    async def broken() -> None:
        raise ZeroDivisionError

    lifecycle.add_check("fine", fine)
    lifecycle.add_check("broken", broken)
    assert await lifecycle.run_checks() == {"fine": "ok", "broken": "ZeroDivisionError"}
