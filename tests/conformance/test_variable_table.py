"""Each kind of variable takes each write, or refuses it, as the table says."""

import numpy as np
import pytest

import keras_dist
from conformance.contract import contract
from conformance.helpers import function
from conformance.helpers import replica_id
from conformance.variables import copies
from conformance.variables import in_replicas
from conformance.variables import parts
from conformance.variables import read
from conformance.variables import refuses
from conformance.variables import variable


def _replica_assign(api, two, make):
    v = make(0.0)
    in_replicas(api, two, lambda r: v.assign(r + 1))
    return copies(v)


def _replica_add(api, two, make):
    v = make(0.0)
    in_replicas(api, two, lambda r: v.assign(r + 1))
    in_replicas(api, two, lambda r: v.assign_add(r + 1))
    return copies(v)


def _cross_read(api, two, make):
    v = make(0.0)
    in_replicas(api, two, lambda r: v.assign(r + 1))
    in_replicas(api, two, lambda r: v.assign_add(r + 1))
    with two.scope():
        return read(v)


def _cross_assign(api, two, make):
    v = make(0.0)
    with two.scope():
        v.assign(8.0)
        assert read(v) == 8.0
    return copies(v)


def _cross_add(api, two, make):
    v = make(8.0)
    with two.scope():
        v.assign_add(2.0)
    return copies(v)


def _cross_per_replica(api, two, make):
    v = make(7.0)
    with two.scope(), refuses(ValueError, v):
        v.assign(parts(two, [0.0, 1.0]))
    return ValueError


def _replica_literal(api, two, make):
    v = make(0.0)
    two.run(lambda: v.assign(4.0))
    return copies(v)


COLUMNS = {
    "replica assign r+1": _replica_assign,
    "then replica add r+1": _replica_add,
    "then cross read": _cross_read,
    "cross assign 8": _cross_assign,
    "cross add 2 to 8": _cross_add,
    "cross assign PerReplica": _cross_per_replica,
    "replica assign 4.0": _replica_literal,
}
_NO = ValueError
_APART = keras_dist.ReplicaDivergenceError
# What the two copies hold afterwards, or what is read, or the error.
TABLE = {
    ("on_write", "none"): (
        *(_APART, _APART, _APART),
        *([8, 8], [10, 10], _NO, [4, 4]),
    ),
    ("on_write", "sum"): ([3, 3], [6, 6], 6, [8, 8], [10, 10], _NO, _NO),
    ("on_write", "mean"): (
        *([1.5, 1.5], [3, 3], 3),
        *([8, 8], [10, 10], _NO, [4, 4]),
    ),
    ("on_write", "only_first_replica"): (
        *([1, 1], [2, 2], 2),
        *([8, 8], [10, 10], _NO, [4, 4]),
    ),
    ("on_read", "none"): ([1, 2], [2, 4], _NO, _NO, _NO, _NO, [4, 4]),
    ("on_read", "sum"): ([1, 2], [2, 4], 6, [4, 4], _NO, _NO, [4, 4]),
    ("on_read", "mean"): (
        *([1, 2], [2, 4], 3),
        *([8, 8], [10, 10], _NO, [4, 4]),
    ),
    ("on_read", "only_first_replica"): (
        *([1, 2], [2, 4], 2),
        *([8, 8], [10, 10], _NO, [4, 4]),
    ),
}
CELLS = [
    pytest.param(*row, column, expected, id=f"{'-'.join(row)}-{column}")
    for row, cells in TABLE.items()
    for column, expected in zip(COLUMNS, cells, strict=True)
]


def _is_lifted(cell):
    """Whether the original diverges here silently, or breaks."""
    *_, column, expected = cell.values
    return expected is _APART or column == "cross assign PerReplica"


CELL = ("synchronization", "aggregation", "column", "expected")


@contract(123, 126, 131)
@pytest.mark.parametrize(CELL, [c for c in CELLS if not _is_lifted(c)])
def test_table_of_writes(
    api, two, synchronization, aggregation, column, expected
):
    def make(initial):
        return variable(
            api,
            two,
            initial,
            synchronization=synchronization,
            aggregation=aggregation,
        )

    if isinstance(expected, type) and column != "cross assign PerReplica":
        with pytest.raises(expected):
            COLUMNS[column](api, two, make)
    else:
        assert COLUMNS[column](api, two, make) == expected


@contract(123, native=False)
@pytest.mark.parametrize(CELL, [c for c in CELLS if _is_lifted(c)])
def test_table_of_writes_where_ours_refuses(
    api, two, synchronization, aggregation, column, expected
):
    test_table_of_writes(
        api, two, synchronization, aggregation, column, expected
    )


@contract(123, native=False)
@pytest.mark.parametrize("method", ["assign", "assign_add", "assign_sub"])
def test_copies_that_would_come_apart_stay_as_they_were(api, mirrored, method):
    v = variable(api, mirrored, 5.0)
    with refuses(keras_dist.ReplicaDivergenceError, v):
        in_replicas(api, mirrored, lambda r: getattr(v, method)(r + 1))
    in_replicas(api, mirrored, lambda r: v.assign(r * 0 + 3))
    assert copies(v) == [3.0] * mirrored.num_replicas_in_sync


@contract(123, native=False)
def test_moving_statistics_become_the_mean(api, mirrored):
    v = variable(api, mirrored, 0.0, trainable=False)
    in_replicas(api, mirrored, lambda r: v.assign(r + 1))
    n = mirrored.num_replicas_in_sync
    assert copies(v) == [(n + 1) / 2] * n


@contract(123, native=False)
def test_large_integers_that_differ_by_one_come_apart(api, mirrored):
    v = variable(api, mirrored, 0, dtype="int32", trainable=False)
    offset = np.arange(20000, 20004, dtype="int32")
    values = mirrored.experimental_distribute_values_from_function(
        lambda context: offset[context.replica_id_in_sync_group]
    )

    def assign(value):
        v.assign(value)

    with refuses(keras_dist.ReplicaDivergenceError, v):
        mirrored.run(assign, args=(values,))
    # A graph of TensorFlow raises its own error, with this text in it.
    with pytest.raises(Exception, match="different values in"):
        mirrored.run(function(assign), args=(values,))


@contract(123, native=False)
def test_other_variables_stay_as_well_when_one_comes_apart(api, two):
    agreeing = variable(api, two, 1.0)
    apart = variable(api, two, 1.0)

    def step(r):
        agreeing.assign(2.0)
        apart.assign(r)

    with refuses(keras_dist.ReplicaDivergenceError, apart):
        in_replicas(api, two, step)
    assert copies(agreeing) == [1.0, 1.0]


@contract(123, native=False)
def test_numbers_of_python_that_differ_are_combined(api, two):
    v = variable(api, two, 0.0, aggregation="sum")
    two.run(lambda: v.assign(float(replica_id(api) + 1)))
    assert copies(v) == [3.0, 3.0]
