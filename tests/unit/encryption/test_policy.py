"""Every case of the decision in which form images leave a device."""

import itertools

import pytest

from encryption.policy import Form, Trust, decide_form
from tierkit.errors import Forbidden
from tierkit.types import Privacy

ALLOWED = {
    (Privacy.AUTO, Trust.TRUSTED, False): Form.PIXELS,
    (Privacy.AUTO, Trust.TRUSTED, True): Form.PIXELS,
    (Privacy.NONE, Trust.TRUSTED, False): Form.PIXELS,
    (Privacy.NONE, Trust.TRUSTED, True): Form.PIXELS,
    (Privacy.AUTO, Trust.UNTRUSTED, True): Form.FEATURES,
}
FORBIDDEN = {
    (Privacy.AUTO, Trust.UNTRUSTED, False): "choose a scheme that stays on trusted nodes",
    (Privacy.NONE, Trust.UNTRUSTED, False): "ask for privacy 'auto'",
    (Privacy.NONE, Trust.UNTRUSTED, True): "ask for privacy 'auto'",
}


def test_the_tables_cover_every_case() -> None:
    cases = set(itertools.product(Privacy, Trust, (False, True)))
    assert cases == ALLOWED.keys() | FORBIDDEN.keys()


@pytest.mark.parametrize(("case", "form"), ALLOWED.items(), ids=str)
def test_allowed(case: tuple[Privacy, Trust, bool], form: Form) -> None:
    privacy, trust, encoder = case
    assert decide_form(privacy, trust, encoder_at_hand=encoder) is form


@pytest.mark.parametrize(("case", "advice"), FORBIDDEN.items(), ids=str)
def test_forbidden_with_advice(case: tuple[Privacy, Trust, bool], advice: str) -> None:
    privacy, trust, encoder = case
    with pytest.raises(Forbidden, match=advice):
        decide_form(privacy, trust, encoder_at_hand=encoder)


def test_pixels_never_reach_an_untrusted_node() -> None:
    for privacy, encoder in itertools.product(Privacy, (False, True)):
        try:
            form = decide_form(privacy, Trust.UNTRUSTED, encoder_at_hand=encoder)
        except Forbidden:
            continue
        assert form is not Form.PIXELS
