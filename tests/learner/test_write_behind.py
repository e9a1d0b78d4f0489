from __future__ import annotations

import threading
from functools import partial

import pytest

from learner.files.write_behind import WriteBehind

DEADLINE_S = 20.0


def test_work_is_done_in_order_behind_its_caller() -> None:
    behind, done, may_begin = WriteBehind(), list[int](), threading.Event()

    def first() -> None:
        assert may_begin.wait(DEADLINE_S)
        done.append(1)

    behind.start(first)
    behind.start(partial(done.append, 2))
    behind.check()
    assert done == []
    may_begin.set()
    behind.wait()
    assert done == [1, 2]
    behind.close()


def test_a_failure_ends_what_follows_and_is_raised_by_every_call() -> None:
    behind, done, may_fail = WriteBehind(), list[int](), threading.Event()

    def full() -> None:
        assert may_fail.wait(DEADLINE_S)
        raise OSError("cannot write weights/v000007")

    behind.start(full)
    behind.start(partial(done.append, 1))  # a checkpoint whose weights are not written
    may_fail.set()
    for call in (behind.wait, behind.check, partial(behind.start, partial(done.append, 2))):
        with pytest.raises(OSError, match="cannot write weights/v000007"):
            call()
    behind.close()
    assert done == []


@pytest.mark.parametrize("error", [None, KeyError("of the block")])
def test_a_block_ends_when_its_work_is_done(error: Exception | None) -> None:
    behind, done, in_block = WriteBehind(), list[int](), threading.Event()

    def slow() -> None:
        assert in_block.wait(DEADLINE_S)
        done.append(1)

    def block() -> None:
        with behind.finishing():
            behind.start(slow)
            in_block.set()
            if error is not None:
                raise error

    if error is None:
        block()
    else:
        with pytest.raises(KeyError):
            block()
    assert done == [1]
    behind.close()


def test_the_error_of_a_block_comes_before_that_of_its_work() -> None:
    behind, in_block = WriteBehind(), threading.Event()

    def fail() -> None:
        assert in_block.wait(DEADLINE_S)
        raise OSError("cannot write")

    def block() -> None:
        with behind.finishing():
            behind.start(fail)
            in_block.set()
            raise KeyError("of the block")

    with pytest.raises(KeyError):
        block()
    with pytest.raises(OSError, match="cannot write"):  # it is not lost
        behind.wait()
    behind.close()
