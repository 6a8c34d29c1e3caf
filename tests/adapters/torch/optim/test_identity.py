"""Whether two long lists hold the same tensors."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from lossscale.torch.optim.identity import are_identical  # noqa: E402

ONE, SAME = torch.ones(()), torch.ones(())


def test_lists_of_the_same_tensors_are_identical():
    tensors = [ONE, torch.ones(3), torch.nn.Parameter(torch.ones(2))]
    assert are_identical(tensors, list(tensors))
    assert are_identical([{"a": ONE, "n": 1}], [{"n": 1, "a": ONE}])


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([ONE], [SAME]),  # equal numbers in other memory
        ([torch.ones(3)], [torch.ones(3)]),
        ([ONE, ONE], [ONE]),
        ([{"a": ONE}], [{"a": SAME}]),
        ([{"a": ONE}], [{"b": ONE}]),
        ([{"a": ONE}], [{"a": ONE, "b": SAME}]),
        ([{"a": None}], [{"a": ONE}]),
        ([{"a": ONE}], [{"a": 1.0}]),
        ([{"a": np.ones(2)}], [{"a": np.ones(2)}]),
        ([torch.nn.Parameter(torch.ones(()))], [torch.nn.Parameter(torch.ones(()))]),
    ],
)
def test_other_tensors_are_not(first, second):
    assert not are_identical(first, second)
    assert not are_identical(second, first)


def test_nothing_is_computed_with_tensors_that_differ():
    elsewhere = torch.ones(3, device="meta")
    assert not are_identical([elsewhere], [torch.ones(3)])


def test_afterwards_tensors_compute_as_before():
    assert not are_identical([ONE], [SAME])
    assert ONE == SAME
