"""Every row of a batch belongs to exactly one replica."""

from hypothesis import given
from hypothesis import strategies as st

from keras_dist.core.rows import RowShard
from keras_dist.core.rows import bounds


@given(st.integers(1, 500), st.integers(1, 16))
def test_shares_partition_the_rows_evenly_and_in_order(rows, replicas):
    edges = bounds(rows, replicas)
    sizes = [b - a for a, b in zip(edges[:-1], edges[1:], strict=True)]
    assert edges[0] == 0
    assert edges[-1] == rows
    assert min(sizes) >= 0
    assert max(sizes) - min(sizes) <= 1
    assert sizes[0] >= 1


@given(st.integers(1, 500), st.integers(1, 16))
def test_weights_of_a_step_add_up_to_one(rows, replicas):
    edges = bounds(rows, replicas)
    shares = [
        RowShard(b - a, rows)
        for a, b in zip(edges[:-1], edges[1:], strict=True)
    ]
    assert abs(sum(share.weight for share in shares) - 1) < 1e-9
    for share in shares:
        assert not share.rows or abs(share.weight * share.inverse - 1) < 1e-9
