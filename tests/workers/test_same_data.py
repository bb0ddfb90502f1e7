"""Workers that were given different data of one length are told so."""

import functools

import pytest

from workers import clusters
from workers import data_jobs
from workers.test_fit import _kinds as kinds
from workers.test_fit import marked_kinds


@functools.cache
def trained_kinds():
    return clusters.run(
        data_jobs.train_kinds, (kinds(),), workers=2, devices=1, timeout=300
    )


@functools.cache
def used_arrays():
    return [
        {name: str(outcome) for name, outcome in each.items()}
        for each in clusters.run(
            data_jobs.use_arrays, workers=2, devices=1, timeout=300
        )
    ]


@pytest.mark.parametrize("kind", marked_kinds())
def test_every_kind_of_data(kind):
    for index, outcomes in enumerate(trained_kinds()):
        told = outcomes[kind]
        assert isinstance(told, str)
        assert told.startswith("ReplicaDivergenceError: Workers were given")
        assert "another `x` on worker 1 than on worker 0" in told
        assert f"On worker {index} it begins with" in told
        assert "distribute_datasets_from_function" in told


@pytest.mark.parametrize(
    "case",
    [
        "y",
        "sample_weight",
        "class_weight",
        "validation_data",
        "x of evaluate",
        "x of predict",
        "x of train_on_batch",
        "validation that is read",
    ],
)
def test_every_argument(case):
    name = case.split()[0]
    name = "validation_data" if name == "validation" else name
    for outcomes in used_arrays():
        told = outcomes[case]
        assert told.startswith("ReplicaDivergenceError: Workers were given")
        assert f"another `{name}`" in told


@pytest.mark.parametrize("case", ["the same", "the same first"])
def test_data_that_begin_alike(case):
    for outcomes in used_arrays():
        assert "Error" not in outcomes[case]
