"""Fair shares: the order of requests, room in the queue, and the expected wait."""

from collections import Counter
from dataclasses import dataclass
from itertools import count

import pytest
from hypothesis import given, strategies as st

from tierkit.inference.sharing import OTHERS, FairQueue, ShareTurns, has_room, wait_s

_number = count()


@dataclass(eq=False)
class Request:
    share: str
    images: int = 1
    urgent: bool = False
    arrived: float = 0.0
    name: int = -1

    def __post_init__(self) -> None:
        self.name = next(_number)


def queue_of(*shares: str) -> FairQueue[Request]:
    return FairQueue(ShareTurns(shares), overtaken_s=2.0)


def served(queue: FairQueue[Request], s_per_image: float = 1.0) -> list[Request]:
    taken = []
    while queue:
        first = queue.first()
        taken.append(queue.take(s_per_image))
        assert taken[-1] is first
    assert (len(queue), queue.images) == (0, 0)
    return taken


def shares(requests: list[Request]) -> str:
    return "".join(request.share or "-" for request in requests)


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ("aaaabb", "ababaa"),  # in turns while both wait
        ("aaaa", "aaaa"),
        ("aabbcc", "abcabc"),
        ("aaa-", "a-aa"),  # requests of no scheduler are one share
        ("bbbbbbbba", "babbbbbbb"),  # a flood does not delay the other
    ],
)
def test_shares_are_served_in_turns(sent: str, expected: str) -> None:
    queue = queue_of("a", "b", "c")
    for share in sent:
        queue.add(Request(share.strip("-")))
    assert shares(served(queue)) == expected


def test_a_share_with_larger_requests_gets_fewer_of_them() -> None:
    queue = queue_of("a", "b")
    for _ in range(4):
        queue.add(Request("a", images=3))
    for _ in range(12):
        queue.add(Request("b"))
    first = served(queue)[:8]
    assert Counter(shares(first)) == {"a": 2, "b": 6}


def test_a_share_saves_no_time_up() -> None:
    queue = queue_of("a", "b")
    for _ in range(100):
        queue.add(Request("b"))
    for _ in range(90):
        queue.take(1.0)
    for _ in range(10):
        queue.add(Request("a"))
    assert shares(served(queue)) in ("ab" * 10, "ba" * 10)


def test_two_models_of_a_node_share_its_time() -> None:
    turns = ShareTurns(["a", "b"])
    one, two = FairQueue[Request](turns, overtaken_s=2.0), FairQueue[Request](turns, overtaken_s=2.0)
    for _ in range(10):
        one.add(Request("b"))
    for _ in range(5):
        two.add(Request("a"))
        one.add(Request("a"))
    order = ""
    while one and two:
        order += min(one, two, key=lambda queue: queue.start).take(1.0).share
    assert abs(order.count("a") - order.count("b")) <= 1


def test_an_urgent_request_overtakes_those_of_its_share() -> None:
    queue = queue_of("a", "b")
    old, late = Request("a", arrived=0.0), Request("a", arrived=5.0, images=3)
    urgent, second = (Request("a", arrived=5.0, urgent=True) for _ in range(2))
    other = Request("b", arrived=5.0)
    for request in (old, late, other):
        queue.add(request)
    assert (queue.overtaken("a", 5.0), queue.overtaken("b", 5.0), queue.overtaken(OTHERS, 5.0)) == (3, 1, 0)
    for request in (urgent, second):
        queue.add(request)
    names = [request.name for request in served(queue) if request.share == "a"]
    assert names == [old.name, urgent.name, second.name, late.name]


REQUESTS = st.lists(
    st.tuples(st.sampled_from(["a", "b", "c", OTHERS]), st.integers(1, 64), st.booleans(), st.booleans()), max_size=60
)


@given(REQUESTS)
def test_every_request_is_served_once_and_within_a_share_in_order(sent: list[tuple[str, int, bool, bool]]) -> None:
    queue, kept = queue_of("a", "b", "c"), []
    for share, images, urgent, leaves in sent:
        request = Request(share, images, urgent)
        queue.add(request)
        if leaves:
            queue.remove(request)
            queue.remove(request)  # a second time changes nothing
        else:
            kept.append(request)
    assert queue.images == sum(request.images for request in kept)
    assert sum(queue.images_of(share) for share in ("a", "b", "c", OTHERS)) == queue.images
    order = served(queue)
    for share in ("a", "b", "c", OTHERS):
        mine = [request for request in kept if request.share == share]
        expected = [r for r in mine if r.urgent] + [r for r in mine if not r.urgent]
        assert [request for request in order if request.share == share] == expected


@given(
    st.dictionaries(st.sampled_from(["a", "b", "c", OTHERS]), st.lists(st.integers(1, 64), min_size=30), min_size=2),
)
def test_while_they_wait_shares_differ_by_one_request(lines: dict[str, list[int]]) -> None:
    queue = queue_of("a", "b", "c")
    for share, sizes in lines.items():
        for images in sizes:
            queue.add(Request(share, images))
    had = dict.fromkeys(lines, 0)
    while all(queue.images_of(share) for share in lines):
        request = queue.take(1.0)
        had[request.share] += request.images
        assert max(had.values()) - min(had.values()) <= 64


@pytest.mark.parametrize(
    ("images", "own", "total", "room"),
    [
        (1, 99, 99, True),
        (1, 100, 100, False),
        (50, 60, 60, False),
        (100, 0, 0, True),  # the whole queue, while nobody else needs it
        (25, 0, 100, True),  # its part, though another has filled the queue
        (26, 0, 100, False),
        (1, 25, 125, False),
    ],
)
def test_a_share_may_borrow_room_and_always_has_its_part(images: int, own: int, total: int, room: bool) -> None:
    assert has_room(images, own=own, total=total, most=100, shares=4) is room


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 100)), max_size=100))
def test_the_queue_holds_less_than_twice_its_size(sent: list[tuple[str, int]]) -> None:
    held: Counter[str] = Counter()
    for share, images in sent:
        if has_room(images, own=held[share], total=held.total(), most=100, shares=4):
            held[share] += images
    assert held.total() < 200


@pytest.mark.parametrize(
    ("queued_s", "own_s", "expected"),
    [
        ({"a": 0.0, "b": 0.0}, 0.0, 1.0),  # only what runs
        ({"a": 0.0, "b": 40.0}, 0.0, 3.0),  # a flood counts for as much as the request itself
        ({"a": 4.0, "b": 40.0}, 4.0, 11.0),
        ({"a": 4.0, "b": 1.0}, 4.0, 6.0),
        ({"a": 4.0, "b": 1.0}, 0.0, 2.0),  # it overtakes the rest of its share
    ],
)
def test_the_others_count_for_as_much_time_as_its_own_share(
    queued_s: dict[str, float], own_s: float, expected: float
) -> None:
    assert wait_s("a", queued_s, running_s=1.0, own_s=own_s, more_s=2.0) == expected
