"""The collector of a call's problems."""

from __future__ import annotations

import pytest

from rpcsvc.errors import InputError, InputErrors, InvalidInput, OrderNotFound
from rpcsvc.operations.inputs import Problems


def wrong(field: str) -> InputError:
    return InvalidInput(f"{field} is wrong.", field=field)


def test_problems_of_several_blocks_are_raised_as_one_error() -> None:
    problems = Problems()
    with problems:
        raise wrong("to")
    with problems:
        raise InputErrors([wrong("chain"), wrong("amount")])
    problems.add(wrong("verify"))

    with pytest.raises(InputErrors) as raised:
        problems.raise_found()
    assert [each.field for each in raised.value.problems] == ["to", "chain", "amount", "verify"]
    assert problems.fields == {"to", "chain", "amount", "verify"}


def test_single_problem_is_raised_as_itself() -> None:
    problem = wrong("to")
    problems = Problems([problem])

    with pytest.raises(InvalidInput) as raised:
        problems.raise_found()
    assert raised.value is problem


def test_no_problem_raises_nothing() -> None:
    problems = Problems()
    with problems:
        pass

    problems.raise_found()
    assert not problems


@pytest.mark.parametrize("error", [OrderNotFound("There is none."), ValueError("a bug")])
def test_errors_that_are_no_problem_of_an_input_pass(error: Exception) -> None:
    problems = Problems()
    with pytest.raises(type(error)), problems:
        raise error
    assert not problems
