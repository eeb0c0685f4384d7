"""W3C Trace Context: which headers are believed, and what goes on."""

import pytest

from tierkit.wire.trace import Trace, new_trace, read_trace, read_traceparent

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize(
    ("value", "flags"),
    [
        (f"00-{TRACE}-{SPAN}-00", 0),
        (f"00-{TRACE}-{SPAN}-01", 1),
        (f"00-{TRACE}-{SPAN}-03", 3),
        (f"00-{TRACE}-{SPAN}-ff", 3),  # flags that mean nothing yet are set to zero
        (f"01-{TRACE}-{SPAN}-01", 1),
        (f"cc-{TRACE}-{SPAN}-01", 1),
        (f"cc-{TRACE}-{SPAN}-01-what-the-future-will-be", 1),
        (f"cc-{TRACE}-{SPAN}-01-", 1),
    ],
)
def test_a_proper_traceparent(value: str, flags: int) -> None:
    trace = read_traceparent(value)
    assert trace == Trace(TRACE, SPAN, flags)
    assert trace.sampled is bool(flags & 1)
    assert trace.traceparent == f"00-{TRACE}-{SPAN}-{flags:02x}"
    assert read_traceparent(trace.traceparent) == trace


@pytest.mark.parametrize(
    "value",
    [
        "",
        "0",
        TRACE,
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE}-{SPAN}-01-",
        f"00-{TRACE}-{SPAN}-01.",
        f"cc-{TRACE}-{SPAN}-01.what-the-future-will-not-be",
        f"cc-{TRACE}-{SPAN}-011",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE}-{SPAN}-0x",
        f"0-{TRACE}-{SPAN}-01",
        f"0x-{TRACE}-{SPAN}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN.upper().replace('0', 'A')}-01",
        f"00-{TRACE[:-1]}-{SPAN}-01",
        f"00-{TRACE}0-{SPAN}-01",
        f"00-{TRACE}-{SPAN[:-1]}-01",
        f"00-{TRACE}-{SPAN}0-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[:-1]}g-{SPAN}-01",
        f"00_{TRACE}_{SPAN}_01",
        f" 00-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01\n",
        f"٠٠-{TRACE}-{SPAN}-01",  # noqa: RUF001 - digits of another script
    ],
)
def test_anything_else_is_none(value: str) -> None:
    assert read_traceparent(value) is None


def test_two_traceparents_are_none() -> None:
    header = (b"traceparent", f"00-{TRACE}-{SPAN}-01".encode())
    assert read_trace([header]) is not None
    assert read_trace([header, header]) is None
    assert read_trace([]) is None
    assert read_trace([(b"tracestate", b"a=1")]) is None


@pytest.mark.parametrize(
    ("states", "passed_on"),
    [
        ([], ""),
        (["congo=t61rcWkgMzE"], "congo=t61rcWkgMzE"),
        (["rojo=00f067aa0ba902b7,congo=t61rcWkgMzE"], "rojo=00f067aa0ba902b7,congo=t61rcWkgMzE"),
        (["foo=1", "bar=2"], "foo=1,bar=2"),
        (["foo=1 \t , \t bar=2, \t baz=3"], "foo=1 \t , \t bar=2, \t baz=3"),
        (["foo=1,,bar=2"], "foo=1,,bar=2"),
        (["fw529a3039@dt=FfAAAA", "0tenant@sys=x"], "fw529a3039@dt=FfAAAA,0tenant@sys=x"),
        (["a-_*/=!#$&'()+./:;<>?@[]^_`{|}~ x"], "a-_*/=!#$&'()+./:;<>?@[]^_`{|}~ x"),
        ([",".join(f"k{number}=v" for number in range(32))], ",".join(f"k{number}=v" for number in range(32))),
        ([",".join(f"k{number}=v" for number in range(33))], ""),
        (["k=" + "v" * 256], "k=" + "v" * 256),
        (["k=" + "v" * 257], ""),
        (["k" * 256 + "=v"], "k" * 256 + "=v"),
        (["k" * 257 + "=v"], ""),
        ([",".join(f"{key}={'v' * 250}" for key in "abcdef")], ""),  # longer than what is passed on
        (["foo"], ""),
        (["foo="], ""),
        (["=1"], ""),
        (["foo=1=2"], ""),
        (["Foo=1"], ""),
        (["foo =1"], ""),
        (["foo=1;bar=2,x"], ""),
        (["foo=\x7f"], ""),
        (["foo=ü"], ""),
        ([""], ""),
        ([" , "], ""),
    ],
)
def test_tracestate_goes_on_unchanged_or_not_at_all(states: list[str], passed_on: str) -> None:
    headers = [(b"traceparent", f"00-{TRACE}-{SPAN}-01".encode())]
    trace = read_trace([*headers, *((b"tracestate", state.encode("latin-1")) for state in states)])
    assert trace is not None
    assert trace.state == passed_on
    assert trace.headers.get("tracestate", "") == passed_on
    broken = [(b"traceparent", b"00-broken"), *((b"tracestate", state.encode("latin-1")) for state in states)]
    assert read_trace(broken) is None


def test_a_new_trace_is_a_proper_one_and_another_each_time() -> None:
    traces = [new_trace() for _ in range(1000)]
    assert [read_traceparent(trace.traceparent) for trace in traces] == traces
    assert len({trace.trace_id for trace in traces}) == len({trace.span_id for trace in traces}) == 1000
    assert not any(trace.sampled for trace in traces)


@pytest.mark.parametrize("sampled", [True, False])
@pytest.mark.parametrize("before", [0, 1, 2, 3])
def test_below_a_span_the_trace_is_the_same(before: int, sampled: bool) -> None:
    trace = Trace(TRACE, SPAN, before, "foo=1")
    assert trace.below("1" * 16) == Trace(TRACE, "1" * 16, before, "foo=1")
    assert trace.with_sampled(sampled) == Trace(TRACE, SPAN, before & 2 | sampled, "foo=1")


def test_what_begins_here_has_nothing_above_it() -> None:
    new = new_trace()
    assert new.begins
    assert read_traceparent(new.traceparent) == new
    assert not new.below("1" * 16).begins
    assert not Trace(TRACE, SPAN).begins
