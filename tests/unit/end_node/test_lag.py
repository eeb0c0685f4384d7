"""The backlog of a live stream, from the times of its frames."""

from end_node.sources.lag import Backlog


def play(backlog: Backlog, *, frames: int, first_s: float, interval_s: float, now: float, pace_s: float) -> list[bool]:
    """Decode frames with timestamps `interval_s` apart, one each `pace_s` seconds."""
    said = []
    for number in range(frames):
        backlog.decoded(first_s + number * interval_s, now + number * pace_s)
        said.append(backlog.long)
    return said


def test_a_decoder_that_is_too_slow_has_a_backlog_until_it_has_caught_up() -> None:
    backlog = Backlog()
    slow = play(backlog, frames=31, first_s=0.0, interval_s=0.1, now=100.0, pace_s=0.15)
    assert slow.index(True) == 21
    assert all(slow[21:])
    # 1.5 s behind: key frames, one for each second of the stream, are decoded in no time.
    caught_up = play(backlog, frames=3, first_s=4.0, interval_s=1.0, now=104.6, pace_s=0.5)
    assert caught_up == [True, False, False]


def test_a_clock_that_drifts_and_timestamps_that_jump_are_no_backlog() -> None:
    backlog = Backlog()
    assert not any(play(backlog, frames=40_000, first_s=0.0, interval_s=0.1, now=0.0, pace_s=0.1 * 1.0005))
    assert not any(play(backlog, frames=100, first_s=90_000.0, interval_s=0.1, now=4002.0, pace_s=0.1))
    assert not any(play(backlog, frames=100, first_s=5.0, interval_s=0.1, now=4012.0, pace_s=0.1))
