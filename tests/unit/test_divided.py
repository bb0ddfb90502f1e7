"""CI gives each backend a share of the cases, and no test is lost."""

import itertools
import pathlib
import types

import pytest

import divided

pytestmark = pytest.mark.once("torch")


class Case:
    """What pytest says of a case of a test."""

    cls = None

    def __init__(self, name, folder, params, marks):
        self.path = pathlib.Path("tests", folder, "test_file.py")
        self.originalname = name
        self.callspec = types.SimpleNamespace(params=params)
        self._marks = marks

    def iter_markers(self, name):
        assert name == "parametrize"
        return iter(self._marks)


def cases(grid, name="test_it", folder="parity", together=()):
    """The cases of one test.

    Args:
        grid: Dict of lists, the value of each parameter in each case.
        name: String, the test's name.
        folder: String, where its file is.
        together: Strings, parameters that one mark gives.
    """
    marks = [pytest.mark.parametrize(names, ()).mark for names in together]
    return [
        Case(name, folder, dict(zip(grid, values, strict=True)), marks)
        for values in zip(*grid.values(), strict=True)
    ]


def product(**grid):
    values = zip(*itertools.product(*grid.values()), strict=True)
    return dict(zip(grid, map(list, values), strict=True))


def share(items, number):
    kept = divided._share(items, number)
    return [item.callspec.params for item in items if item in kept]


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("name", ["test_a", "test_b", "test_c", "test_d"])
@pytest.mark.parametrize("size", range(1, 8))
def test_no_test_is_left_out_whole(size, name, number):
    kept = share(cases({"number": [*range(size)]}, name), number)
    assert 1 <= len(kept) <= -(-size // 3)


@pytest.mark.parametrize("name", ["test_a", "test_b", "test_c", "test_d"])
def test_shares_differ(name):
    items = cases(product(layer=[*"abcde"], num_replicas=[2, 3, 4]), name)
    shares = [share(items, number) for number in range(3)]
    assert [len(each) for each in shares] == [5, 5, 5]
    together = sum(shares, [])
    assert all(item.callspec.params in together for item in items)


@pytest.mark.parametrize("number", range(3))
def test_each_value_is_tried_beside_others(number):
    grid = product(
        layer=[*"abcde"], num_replicas=[2, 3, 4], eager=[False, True]
    )
    kept = share(cases(grid), number)
    for name in ("layer", "num_replicas", "eager"):
        assert {params[name] for params in kept} == set(grid[name])
    assert len(kept) == 10


def test_parameters_of_one_mark_are_one():
    grid = {"text": ["", "a", "b"], "error": [True, True, False]}
    kept = [share(cases(grid, together=["text, error"]), n) for n in range(3)]
    assert sorted(each["text"] for (each,) in kept) == ["", "a", "b"]


def test_a_share_does_not_depend_on_the_other_tests():
    first = cases(product(layer=[*"abcde"], kind=[*"xy"]), "test_a")
    second = cases({"layer": [*"abc"]}, "test_b")
    kept = share([*second, *first], 1)
    assert [
        params for params in kept if "layer" in params and "kind" in params
    ] == share(first, 1)


def test_tests_of_a_backend_are_whole(monkeypatch):
    items = cases({"number": [*range(9)]}, folder="backends")
    for backend in divided.SHARES:
        monkeypatch.setattr(divided, "BACKEND", backend)
        assert not any(map(divided._is_divided, items))
