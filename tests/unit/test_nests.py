"""All that walks nests meets their leaves in one order."""

import collections
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keras_dist.core import nests

pytestmark = pytest.mark.runs_on("torch")

Pair = collections.namedtuple("Pair", ["second", "first"])


def _containers(items):
    keys = st.one_of(st.sampled_from(string.ascii_lowercase), st.integers(0, 9))
    mappings = st.dictionaries(keys, items, max_size=4)
    return st.one_of(
        st.lists(items, max_size=3),
        st.tuples(items, items),
        st.builds(Pair, items, items),
        mappings,
        mappings.map(collections.OrderedDict),
    )


any_nest = st.recursive(st.integers(), _containers, max_leaves=12)


@given(any_nest)
def test_the_order_is_the_same_everywhere(nest):
    met = []
    copy = nests.map_nest(lambda leaf: met.append(leaf) or leaf, nest)
    leaves = nests.leaves_of(nest)
    assert met == leaves
    assert [leaf for _, leaf in nests.named_leaves(nest)] == leaves
    assert copy == nests.pack(nest, leaves) == nest
    # Keys stand as before.
    assert repr(copy) == repr(nests.pack(nest, leaves)) == repr(nest)
    assert nests.joined([nest, nest], min) == nest
