"""Every case of the decision in which form images leave a device."""

import itertools

import pytest

from encryption.policy import Form, Trust, decide_form
from tierkit.errors import Conflict, Forbidden
from tierkit.types import EncoderKind, Privacy

NONE: frozenset[EncoderKind] = frozenset()
CONV1 = frozenset({EncoderKind.CONV1})
BOTTLENECK = frozenset({EncoderKind.BOTTLENECK})
BOTH = CONV1 | BOTTLENECK
HELD = (NONE, CONV1, BOTTLENECK, BOTH)

P, C, B = Form.PIXELS, Form.CONV1, Form.BOTTLENECK
TABLE = {
    # what the two sides hold:          NONE       CONV1      BOTTLENECK  BOTH
    (Privacy.AUTO, Trust.TRUSTED): (P, P, P, P),
    (Privacy.AUTO, Trust.UNTRUSTED): (Forbidden, C, B, B),
    (Privacy.NONE, Trust.TRUSTED): (P, P, P, P),
    (Privacy.NONE, Trust.UNTRUSTED): (Forbidden, Forbidden, Forbidden, Forbidden),
    (Privacy.CONV1, Trust.TRUSTED): (Conflict, C, Conflict, C),
    (Privacy.CONV1, Trust.UNTRUSTED): (Conflict, C, Conflict, C),
    (Privacy.BOTTLENECK, Trust.TRUSTED): (Conflict, Conflict, B, B),
    (Privacy.BOTTLENECK, Trust.UNTRUSTED): (Conflict, Conflict, B, B),
}
CASES = [(privacy, trust, held, row[at]) for (privacy, trust), row in TABLE.items() for at, held in enumerate(HELD)]


def test_the_table_covers_every_case():
    assert set(itertools.product(Privacy, Trust, HELD)) == {case[:3] for case in CASES}


@pytest.mark.parametrize(("privacy", "trust", "held", "expected"), CASES)
def test_each_case(
    privacy: Privacy, trust: Trust, held: frozenset[EncoderKind], expected: Form | type[Exception]
) -> None:
    if isinstance(expected, Form):
        assert decide_form(privacy, trust, held) is expected
    else:
        with pytest.raises(expected, match=r"ask for privacy 'auto'|choose a scheme"):
            decide_form(privacy, trust, held)


@pytest.mark.parametrize("encodes", [False, True])
def test_pixels_never_go_to_an_untrusted_node(encodes: bool):
    for privacy, held in itertools.product(Privacy, HELD):
        try:
            form = decide_form(privacy, Trust.UNTRUSTED, held, encodes=encodes)
        except (Forbidden, Conflict):
            continue
        assert form is not Form.PIXELS


def test_a_trusted_node_that_encodes_for_others_gets_pixels():
    for privacy in Privacy:
        assert decide_form(privacy, Trust.TRUSTED, encodes=True) is Form.PIXELS
