"""Every row of a batch belongs to exactly one replica."""

from hypothesis import given
from hypothesis import strategies as st

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
