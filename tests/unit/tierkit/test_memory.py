"""Modules are imported without garbage collection."""

import gc

import pytest

from tierkit.memory import importing


def test_garbage_is_collected_again_after_an_import_and_after_one_that_fails() -> None:
    with importing():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ImportError), importing():
        raise ImportError
    assert gc.isenabled()


def test_what_is_there_after_the_import_is_frozen_if_it_stays() -> None:
    before = gc.get_freeze_count()
    with importing(freeze=True):
        assert gc.get_freeze_count() == before
    assert gc.get_freeze_count() > before
