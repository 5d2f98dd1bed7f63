from __future__ import annotations

import gc
import weakref

import pytest

from leaktight.runtime.latest import Latest


class Thing:
    pass


def test_the_last_value_is_kept_and_the_one_before_is_gone() -> None:
    latest: Latest[Thing] = Latest()
    first = latest.get("a", Thing)
    assert latest.get("a", Thing) is first
    old = weakref.ref(first)
    del first

    def made() -> Thing:
        gc.collect()
        assert old() is None, "two would be held at once"
        return Thing()

    second = latest.get("b", made)
    assert latest.get("b", Thing) is second
    assert latest.get("a", Thing) is not second


def test_what_could_not_be_made_is_tried_again() -> None:
    latest: Latest[int] = Latest()
    with pytest.raises(ZeroDivisionError):
        latest.get("a", lambda: 1 // 0)
    assert latest.get("a", lambda: 1) == 1
