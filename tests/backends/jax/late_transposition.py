"""A report to JAX: gradients are transposed after they are summed, on CPUs.

JAX differentiates `x @ kernel` as `transpose(dot(cotangent, x))`. On one
device, XLA makes `dot(x, cotangent)` of it. Where `x` is divided over devices,
the partitioner comes first: it puts the all-reduce between the product and the
transposition. No later pass moves it away, or exchanges the operands. The
compiler for CPUs then reads the sum column by column, once in each fusion that
needs it: twice for Adam. On two cores, this step takes about TIMES times as
long as the same step with the operands exchanged by hand.

This script prints both programs, shortened. Found with JAX 0.10.2 and 0.12.0:

    PROGRAMS

Expected: the second program for both, for example because the transpose rule
of `dot_general` exchanges the operands where the permutation allows it, or
because XLA folds the transposition before it partitions. Accelerators are not
affected: there, both give the same fusions.
"""

import os
import re

if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax
from jax import lax
from jax import numpy as jnp
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

ROWS, INPUTS, OUTPUTS = 64, 1024, 512


def step(kernel, mean, square, x, exchanged):
    """A step of Adam, for the sum of the outputs of a layer."""

    def loss(kernel):
        return jnp.sum(jnp.tanh(x @ kernel))

    if exchanged:
        cotangent = 1 - jnp.tanh(x @ kernel) ** 2
        contracted = (((0,), (0,)), ((), ()))
        gradient = lax.dot_general(x, cotangent, contracted)
    else:
        gradient = jax.grad(loss)(kernel)
    mean = 0.9 * mean + 0.1 * gradient
    square = 0.999 * square + 0.001 * gradient**2
    return kernel - 0.01 * mean / (jnp.sqrt(square) + 1e-7), mean, square


def compiled(exchanged):
    """The step for two devices, of which each has half of the rows."""
    mesh = Mesh(jax.devices("cpu")[:2], ("rows",))
    whole = NamedSharding(mesh, PartitionSpec())
    cut = NamedSharding(mesh, PartitionSpec("rows"))
    kernel = jax.ShapeDtypeStruct((INPUTS, OUTPUTS), "float32")
    x = jax.ShapeDtypeStruct((ROWS, INPUTS), "float32")
    program = jax.jit(
        step,
        static_argnums=4,
        in_shardings=(whole, whole, whole, cut),
        out_shardings=whole,
        donate_argnums=(0, 1, 2),
    )
    return program.lower(kernel, kernel, kernel, x, exchanged).compile()


def sums_of(text):
    """The shapes of what a program's text sums over devices."""
    results = re.findall(r"= (.*?) all-reduce(?:-start)?\(", text)
    found = re.findall(r"\w+\[([\d,]*)\]", " ".join(results))
    return [tuple(map(int, shape.split(","))) for shape in found if shape]


def main():
    """Prints the instructions from the gradient on, of both programs."""
    for exchanged in (False, True):
        print("operands exchanged by hand" if exchanged else "as JAX has it")
        for line in compiled(exchanged).as_text().splitlines():
            if re.search(r" (all-reduce|transpose|dot)\(", line):
                print(line.partition(", metadata")[0][:76])


if __name__ == "__main__":
    main()
