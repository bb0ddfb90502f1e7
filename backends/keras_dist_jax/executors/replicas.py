"""Replica functions, called once for each replica, on the replica's device."""

import contextlib
import functools
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import TypeVar

import jax
import keras

from keras_dist.errors import UnsupportedModelError
from keras_dist.plugins import ALONE
from keras_dist.plugins import WHOLE
from keras_dist.plugins import LockstepThreads
from keras_dist.plugins import Replica
from keras_dist.plugins import ReplicaGroup
from keras_dist.plugins import ReplicaRunner
from keras_dist.plugins import Round
from keras_dist.plugins import inherit_thread_state
from keras_dist.plugins import outside_replicas
from keras_dist.plugins import thread_state
from keras_dist_jax import keras_internals as internals
from keras_dist_jax.central.storage import StorageLayouts
from keras_dist_jax.cluster.workers import JaxWorkers
from keras_dist_jax.functions.gradients import summed_by
from keras_dist_jax.placement.layout import Layout
from keras_dist_jax.placement.layout import default_device
from keras_dist_jax.variables.storage import read_aliased
from keras_dist_jax.variables.storage import shard_on

T = TypeVar("T")


class JaxReplicas(ReplicaRunner):
    """Replica functions in threads, one of which runs at a time."""

    # Arrays are dispatched without waiting, so that devices work at the same
    # time although replicas take turns.

    def __init__(
        self,
        layout: Layout,
        first: int = 0,
        workers: JaxWorkers | None = None,
        storage_layout: Layout | StorageLayouts | None = None,
    ) -> None:
        self._layout = layout
        self._storage_layout = storage_layout or layout
        self._workers, self._first = workers, first
        self._batons = LockstepThreads(
            lambda: functools.partial(inherit_thread_state, thread_state())
        )

    def call(self, fn: Callable[[Replica], T]) -> list[T]:
        devices = self._layout.devices
        round_ = Round(len(devices))
        group = ReplicaGroup(self._workers, self._first)

        def on_device(index: int) -> T:
            with default_device(devices[index]):
                storage_layout = self._storage_layout.devices[0]
                return fn(
                    JaxReplica(index, round_, devices, group, storage_layout)
                )

        fns = [functools.partial(on_device, i) for i in range(len(devices))]
        results: list[T] = self._batons.run(round_, fns)
        return results

    def sum_gradients(
        self,
        replica: Replica | None,
        gradients: Sequence[Sequence[Any]],
        weights: Sequence[Any],
        variables: Sequence[keras.Variable],
        numbers: Sequence[Any] = (),
    ) -> list[Any]:
        totals = [
            self._sum([g for g in terms if g is not None])
            for terms in zip(*gradients, strict=True)
        ]
        summed = [total for total in totals if total is not None]
        workers = self._workers
        if workers is not None:
            summed = workers.sum(summed)
        # The update runs on each device that has the variables.
        placed = iter([self._storage_layout.place(total) for total in summed])
        return [None if total is None else next(placed) for total in totals]

    def _sum(self, terms: list[Any]) -> Any:
        if not terms:
            return None
        primary = self._storage_layout.devices[0]
        return functools.reduce(
            jax.numpy.add, [jax.device_put(term, primary) for term in terms]
        )

    def building(self) -> contextlib.AbstractContextManager[Any]:
        return default_device(self._storage_layout.devices[0])


class JaxReplica(Replica):
    """One replica, in a thread of its own."""

    def __init__(
        self,
        index: int,
        round_: Round,
        devices: Sequence[Any],
        group: ReplicaGroup = ALONE,
        storage_layout: object = None,
    ) -> None:
        super().__init__(index, WHOLE, group)
        self._storage_layout = (
            devices[0] if storage_layout is None else storage_layout
        )
        self._round = round_
        self._devices = devices
        self._device = devices[index]

    def rendezvous(
        self, what: str, fn: Callable[[list[Any]], T], value: object
    ) -> T:
        for leaf in jax.tree.leaves(value):
            if isinstance(leaf, jax.core.Tracer):
                raise UnsupportedModelError(
                    f"Replicas can't wait for each other for {what} inside of "
                    "`jax.jit`, `jax.vmap`, `jax.lax` control flow or a "
                    f"second derivative: JAX gave {leaf!r} in place of a "
                    "value. Expected: collectives, updates and assignments "
                    "in the replica function itself or under `jax.grad` and "
                    "`jax.value_and_grad`. Move the call out of the "
                    "transformed function."
                )

        def hold(values: list[Any]) -> T:
            with outside_replicas(), default_device(self._storage_layout):
                return fn(values)

        result: T = self._round.rendezvous(self.index, what, hold, value)
        here: T = jax.tree.map(self._here, result)
        return here

    def _here(self, leaf: object) -> Any:
        if isinstance(leaf, jax.Array):
            return shard_on(leaf, self._device)
        return leaf

    def all_sum(self, what: str, value: object, total: object = None) -> Any:
        def add(replica: JaxReplica, value: object) -> Any:
            if total is not None:
                return total
            value = jax.device_put(value, replica._device)
            return replica.all_reduce(what, value)

        return summed_by(lambda: self, what, add)(value)

    def at_home(self, value: object) -> Any:
        return jax.device_put(value, self._devices[0])

    def read(self, variable: keras.Variable) -> Any:
        if internals.array_of(variable) is None:
            return None
        return read_aliased(variable, self._device)

    def hold(self, variable: keras.Variable, value: object) -> Any:
        return value
