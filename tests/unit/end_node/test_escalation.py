"""Which images go up: tables, and every image in one place."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from end_node.escalation import Below, going_up, read_stages
from tierkit.errors import InvalidInput
from tierkit.types import Tier
from tierkit.wire.messages import Stage, Upstream


def probabilities(*margins: float):
    """`[n, 2]` with these margins."""
    top = (1 + np.array(margins, np.float32)) / 2
    return np.stack([1 - top, top], axis=1)


def below(answered: dict[int, float], lost: tuple[int, ...] = ()) -> Below:
    return Below(
        answered=np.array(list(answered)), probabilities=probabilities(*answered.values()), lost=np.array(lost)
    )


def test_nothing_is_unsure_and_everything_is_with_no_threshold():
    four = Below.of_all(4, probabilities(0.0, 0.5, 0.75, 1.0))
    assert going_up(Stage(tier=Tier.EDGE, below=0.0), four).tolist() == []
    assert going_up(Stage(tier=Tier.EDGE, below=0.75), four).tolist() == [0, 1]
    assert going_up(Stage(tier=Tier.EDGE, below=2.0), four).tolist() == [0, 1, 2, 3]
    assert going_up(Stage(tier=Tier.EDGE), four).tolist() == [0, 1, 2, 3]
    assert going_up(Stage(tier=Tier.EDGE), Below.of_all(2, None)).tolist() == [0, 1]
    assert going_up(Stage(tier=Tier.EDGE, only=(1, 3)), Below.of_all(4, None)).tolist() == [1, 3]


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        (Stage(tier=Tier.CLOUD, below=0.5), [2, 3, 7]),
        (Stage(tier=Tier.CLOUD, below=0.5, spare=False), [2]),
        (Stage(tier=Tier.CLOUD), [2, 3, 5, 7]),
        (Stage(tier=Tier.CLOUD, below=0.0), [3, 7]),
    ],
)
def test_what_the_tier_below_has_lost_goes_up_as_a_spare(stage: Stage, expected: list[int]):
    assert going_up(stage, below({2: 0.25, 5: 0.75}, lost=(3, 7))).tolist() == expected


@given(st.lists(st.tuples(st.floats(0, 1, width=32), st.booleans()), max_size=40), st.none() | st.floats(0, 2))
def test_an_image_goes_up_once_or_stays(images: list[tuple[float, bool]], threshold: float | None):
    lost = tuple(index for index, (_, gone) in enumerate(images) if gone)
    tier = below({index: margin for index, (margin, gone) in enumerate(images) if not gone}, lost)
    for spare in (True, False):
        going = going_up(Stage(tier=Tier.CLOUD, below=threshold, spare=spare), tier).tolist()
        assert going == sorted(set(going))
        assert set(going) <= set(range(len(images)))
        assert set(lost) <= set(going) if spare else not set(lost) & set(going)


def node(tier: str) -> Upstream:
    return Upstream(
        node_id=f"{tier}-1", url="http://127.0.0.1:1", tier=Tier(tier), model="m", sha256="0" * 64, encoding=None
    )


@pytest.mark.parametrize(
    ("header", "tiers", "coarse_known", "complaint"),
    [
        ("{", ["edge"], False, "cannot be read"),
        ('[{"tier":"edge","below":-1}]', ["edge"], False, r"0\.below: .*greater than or equal to 0"),
        ('[{"tier":"edge","below":NaN}]', ["edge"], False, "cannot be read"),
        ('[{"tier":"edge","over":1}]', ["edge"], False, r"0\.over"),
        ("[]", ["edge"], False, "it has nothing"),
        ('[{"tier":"end"}]', ["edge"], False, "must be 'edge' or 'cloud', the tiers above the end devices"),
        ('[{"tier":"cloud"},{"tier":"edge"}]', ["edge", "cloud"], False, "it has cloud, edge"),
        ('[{"tier":"edge"},{"tier":"edge"}]', ["edge"], False, "it has edge, edge"),
        ('[{"tier":"edge"}]', ["edge", "cloud"], False, "none of another tier"),
        ('[{"tier":"edge"}]', [], False, "nodes of no tier"),
        ('[{"tier":"edge","below":0.5}]', ["edge"], True, "ask for both stages"),
        ('[{"tier":"edge","only":[1]}]', ["edge"], False, "when the coarse answer is known"),
        ('[{"tier":"edge","only":[2,1]}]', ["edge"], True, "in rising order"),
        ('[{"tier":"edge"},{"tier":"cloud","only":[1]}]', ["edge", "cloud"], True, "it has no other place"),
    ],
)
def test_a_wrong_header_says_what_is_wrong(header: str, tiers: list[str], coarse_known: bool, complaint: str):
    with pytest.raises(InvalidInput, match=complaint):
        read_stages(header, [node(tier) for tier in tiers], coarse_known=coarse_known)


def test_a_header_that_is_right():
    assert read_stages(None, [node("edge")], coarse_known=True) == ()
    header = '[{"tier":"edge"},{"tier":"cloud","below":0.4,"spare":false}]'
    stages = Stage(tier=Tier.EDGE), Stage(tier=Tier.CLOUD, below=0.4, spare=False)
    assert read_stages(header, [node("edge"), node("cloud")], coarse_known=True) == stages
    # A tier of which there is no node is lost, and that is told.
    assert read_stages(header, [node("edge")], coarse_known=True) == stages
