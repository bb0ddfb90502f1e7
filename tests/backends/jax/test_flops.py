"""The work of a program is that of its matrix products."""

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec

from keras_dist_jax.targets.flops import flops_of

A, B = np.ones((3, 4), "float32"), np.ones((4, 5), "float32")
PRODUCT = 2 * 3 * 4 * 5


def of_inputs(a):
    """The derivative of a convolution that skips every other row and column."""

    def total(x):
        kernel = np.ones((5, 3, 2, 2), "float32")
        return lax.conv(x, kernel, (2, 2), "VALID").sum()

    return jax.grad(total)(np.ones((1, 3, 8, 8), "float32") * a.sum())


def images(groups):
    return lax.conv_general_dilated(
        np.ones((2, 8, 8, 4), "float32"),
        np.ones((3, 3, 4 // groups, 6), "float32"),
        (1, 1),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
    )


@pytest.mark.parametrize(
    "function, flops",
    [
        (lambda a, b: a @ b, PRODUCT),
        (lambda a, b: np.stack([A] * 7) @ np.stack([B] * 7), 0),
        (lambda a, b: np.stack([A] * 7) @ b, 7 * PRODUCT),
        (lambda a, b: images(1), 2 * 2 * 8 * 8 * 6 * 3 * 3 * 4),
        (lambda a, b: images(2), 2 * 2 * 8 * 8 * 6 * 3 * 3 * 2),
        (lambda a, b: jax.jit(lambda a: a @ b)(a), PRODUCT),
        (
            lambda a, b: lax.scan(lambda c, _: (c, a @ (b + c)), 1.0, None, 6)[
                1
            ],
            6 * PRODUCT,
        ),
        (
            lambda a, b: lax.cond(
                a.any(), lambda: a @ b, lambda: a @ b @ b.T @ b
            ),
            3 * PRODUCT,
        ),
        (lambda a, b: of_inputs(a), 2 * 2 * (4 * 4 * 5) * (3 * 2 * 2)),
        (
            lambda a, b: jax.grad(lambda a: (a @ b).sum() ** 2)(a),
            2 * PRODUCT,
        ),
    ],
)
def test_products_and_convolutions(function, flops):
    program = jax.make_jaxpr(function)(A, B)
    assert flops_of(program, 1) == flops


def test_a_region_has_the_work_of_each_device():
    mesh = Mesh(np.array(jax.devices()[:4]), ("replica",))
    spec = PartitionSpec("replica")
    own = jax.shard_map(
        lambda a: a @ B, mesh=mesh, in_specs=spec, out_specs=spec
    )
    program = jax.make_jaxpr(own)(np.ones((12, 4), "float32"))
    assert flops_of(program, 4) == PRODUCT
