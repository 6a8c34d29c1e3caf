"""Nested structures: every kind, their paths, and where two differ."""

from collections import Counter, OrderedDict, defaultdict
from typing import Any, NamedTuple

import pytest

from lossscale.core import trees
from lossscale.errors import StructureError


class Pair(NamedTuple):
    left: Any
    right: Any


STRUCTURE = {"a": [1, (2, None)], "b": Pair(3, {"c": 4}), "d": (), 5: None}


def test_leaves_come_with_their_paths():
    assert [
        ("['a'][0]", 1),
        ("['a'][1][0]", 2),
        ("['b'].left", 3),
        ("['b'].right['c']", 4),
    ] == list(trees.leaves(STRUCTURE))


def test_a_bare_leaf_has_an_empty_path_and_none_is_no_leaf():
    assert [("", 7)] == list(trees.leaves(7))
    assert [] == list(trees.leaves(None))


def test_mapping_keeps_the_kinds():
    doubled = trees.map_leaves(lambda _, leaf: 2 * leaf, STRUCTURE)
    expected = {"a": [2, (4, None)], "b": Pair(6, {"c": 8}), "d": (), 5: None}
    assert expected == doubled
    assert isinstance(doubled["b"], Pair)


def test_mapping_keeps_the_kind_of_dict():
    ordered = OrderedDict(b=1, a=2)
    filled = defaultdict(int, a=1)
    assert OrderedDict(b=2, a=3) == trees.map_leaves(lambda _, x: x + 1, ordered)
    mapped = trees.map_leaves(lambda _, x: x + 1, filled)
    assert int is mapped.default_factory
    assert {"a": 3} == trees.map_leaves(lambda _, x: x + 1, Counter(a=2))
    assert {"a": 1} == filled


@pytest.mark.parametrize(
    ("first", "second", "place"),
    [
        ({"a": 1}, {"b": 1}, "the top"),
        ({"a": [1]}, {"a": [1, 2]}, "['a']"),
        ([1], (1,), "the top"),
        ({"a": None}, {"a": 1}, "['a']"),
        (Pair(1, [2]), Pair(1, 2), ".right"),
    ],
)
def test_the_first_difference_is_named(first, second, place):
    with pytest.raises(StructureError) as caught:
        trees.check_same_structure(first, second)
    assert f"differ at {place}:" in str(caught.value)


def test_neither_the_order_of_keys_nor_the_kind_of_dict_matters():
    first, second = {"a": 1, "b": [2]}, OrderedDict(b=[3], a=4)
    assert trees.check_same_structure(first, second) is None


def test_equal_structures_pass():
    assert trees.check_same_structure(STRUCTURE, STRUCTURE) is None
