"""CI gives each backend a share of the cases, and no test is lost."""

import collections
import itertools
import pathlib
import types

import pytest

import divided

pytestmark = pytest.mark.runs_on("torch")


class Case:
    """What pytest says of a case of a test."""

    cls = None

    def __init__(self, name, folder, params, marks):
        self.path = pathlib.Path("tests", folder, "test_file.py")
        self.originalname = name
        self.name = f"{name}[{'-'.join(map(str, params.values()))}]"
        self.callspec = types.SimpleNamespace(params=params, id=self.name)
        self._marks = marks

    def iter_markers(self, name):
        return iter(self._marks if name == "parametrize" else ())


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


def shares(items):
    """The parameters of the cases that each backend runs."""
    return {
        backend: [
            case.callspec.params for case in divided.share(items, backend)
        ]
        for backend in divided.SHARING
    }


NAMES = [f"test_{letter}" for letter in "abcdefghijkl"]
OTHERS = ("jax", "tensorflow")


@pytest.mark.parametrize("size", range(1, 8))
def test_one_backend_runs_every_other_case_that_starts_processes(size):
    grid = {"number": [*range(size)]}
    for name in NAMES:
        found = shares(cases(grid, name, folder="workers"))
        counts = collections.Counter(
            params["number"] for kept in found.values() for params in kept
        )
        assert counts == dict.fromkeys(range(0, size, 2), 1)
        # And no page of the documentation is left out.
        found = shares(cases(grid, name, folder="docs"))
        assert sum(map(len, found.values())) == size


def test_what_looks_at_one_process_is_run_by_one_backend():
    fixtures = {
        "hygiene": [types.SimpleNamespace(scope="function")],
        "finished": [types.SimpleNamespace(scope="module")],
    }
    users = []
    for name in NAMES:
        (case,) = cases({"number": [0]}, name, folder="launch")
        case._fixtureinfo = types.SimpleNamespace(name2fixturedefs=fixtures)
        found = shares([case])
        users += [backend for backend, kept in found.items() if kept]
    assert len(users) == len(NAMES)
    assert len(set(users)) == 1


@pytest.mark.parametrize("size", [1, 2, 4, 8, 9, 18])
def test_pytorch_runs_all_others_and_the_compilers_a_ninth(size):
    for name in NAMES:
        items = cases({"number": [*range(size)]}, name, folder="parity")
        found = shares(items)
        assert found["torch"] == [{"number": index} for index in range(size)]
        for backend in OTHERS:
            count = len(found[backend])
            assert count in (size // 9, -(-size // 9))
        both = [*found["jax"], *found["tensorflow"]]
        assert len({each["number"] for each in both}) == len(both)


@pytest.mark.parametrize("backend", OTHERS)
def test_the_contract_is_run_by_all_but_for_training(backend):
    items = cases({"number": [*range(9)]}, folder="conformance")
    assert len(shares(items)[backend]) == 9
    items = cases({"number": [*range(9)]}, "test_it_in_run", "conformance")
    assert len(shares(items)[backend]) == 1


@pytest.mark.parametrize("backend", OTHERS)
def test_each_value_is_tried_beside_others(backend):
    grid = product(layer=[*"abcdefghi"], num_replicas=[2, 3, 4], eager=[0, 1])
    kept = shares(cases(grid))[backend]
    for name in ("num_replicas", "eager"):
        assert {params[name] for params in kept} == set(grid[name])
    assert len({params["layer"] for params in kept}) == len(kept) == 6
    # Of tests of one case, it runs some.
    kept = [shares(cases({"number": [0]}, name))[backend] for name in NAMES]
    assert 0 < sum(map(bool, kept)) < len(NAMES) // 2


def test_parameters_of_one_mark_are_one():
    texts = [f"{number}" for number in range(18)]
    grid = {"text": texts, "error": [number < 9 for number in range(18)]}
    found = shares(cases(grid, together=["text, error"]))
    for backend in OTHERS:
        first, second = (int(each["text"]) for each in found[backend])
        assert second - first == 9


def test_a_backend_runs_its_own_tests():
    for folder in ("backends", "cross"):
        items = cases({"number": [*range(9)]}, folder=folder)
        assert all(len(kept) == 9 for kept in shares(items).values())
    grid = product(layer=[*"abcde"], kind=["x", "y"])
    for kept in shares(cases(grid, folder="backends")).values():
        assert len(kept) in (3, 4)
        assert {params["kind"] for params in kept} == {"x", "y"}


@pytest.mark.parametrize(("size", "kept"), [(1, 1), (2, 2), (3, 1), (9, 3)])
def test_what_pytorch_can_not_run_is_run_by_a_third(size, kept):
    items = cases({"number": [*range(size)]})
    for backend in OTHERS:
        assert len(divided.share_of_some(items, backend)) == kept


@pytest.mark.parametrize(
    ("chosen", "count"), [("one", 0), ("all", 1), (None, 1)]
)
def test_nightly_tests_are_left_to_the_night(monkeypatch, chosen, count):
    (case,) = items = cases({"number": [0]})
    case.get_closest_marker = {"nightly": pytest.mark.nightly.mark}.get
    deselected = []
    config = types.SimpleNamespace(
        option=types.SimpleNamespace(markexpr=""),
        hook=types.SimpleNamespace(
            pytest_deselected=lambda items: deselected.extend(items)
        ),
    )
    monkeypatch.setattr(divided, "BACKEND", "torch")
    if chosen is None:
        monkeypatch.delenv("TESTS_DIVIDED", raising=False)
    else:
        monkeypatch.setenv("TESTS_DIVIDED", chosen)
    divided.divide(config, items)
    assert (len(items), len(deselected)) == (count, 1 - count)
