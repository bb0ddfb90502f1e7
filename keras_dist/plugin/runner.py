"""Runs replicas, and the steps of `fit` on them: an executor's second part."""

import contextlib
from abc import ABC
from abc import abstractmethod
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import TypeVar

import keras

from keras_dist.plugin.places import Places
from keras_dist.plugin.replica import Replica

T = TypeVar("T")


class ReplicaRunner(ABC):
    """A runner of replicas, which also sums their gradients."""

    @abstractmethod
    def call(self, fn: Callable[[Replica], T]) -> list[T]:
        """Calls `fn(replica)` once for each replica, on its device.

        Args:
            fn: Callable. May use the replica's collectives. Each replica's
                `share` is the whole, so that sums have no weights.

        Returns:
            List of its results, replica 0 first.

        Raises:
            BaseException: The error of the first replica that failed, with a
                note that names the replica, once all the others have unwound.
        """

    @abstractmethod
    def sum_gradients(
        self,
        replica: Replica,
        gradients: Sequence[Sequence[Any]],
        weights: Sequence[Any],
        variables: Sequence[keras.Variable],
        numbers: Sequence[Any] = (),
    ) -> list[Any]:
        """Sums gradients over all replicas, in as few collectives as possible.

        It is called once, at a rendezvous of the replicas.

        Args:
            replica: One of them.
            gradients: For each local replica, its gradients, `None` where there
                is none.
            weights: For each local replica, a float or float scalar tensor.
            variables: Sequence of the gradients' variables.
            numbers: Sequence of integers and scalar tensors that float32 has,
                this worker's part of sums that travel with the gradients. It
                is given only if `carries` returns true.

        Returns:
            List with a gradient for each variable, `None` where no replica has
            one, and then with the float32 sums of the numbers.
        """

    def carries(self, variables: Sequence[keras.Variable]) -> bool:
        """Returns whether numbers may travel with gradients.

        Args:
            variables: Sequence of the gradients' variables.
        """
        return False

    def updating(
        self, optimizer: keras.optimizers.Optimizer
    ) -> contextlib.AbstractContextManager[Any]:
        """Returns a context in which an optimizer applies summed gradients.

        Args:
            optimizer: A `keras.optimizers.Optimizer`.
        """
        return contextlib.nullcontext()

    def building(self) -> contextlib.AbstractContextManager[Any]:
        """Returns a context to make variables in, in the middle of a step."""
        return contextlib.nullcontext()


class StepRunner(ReplicaRunner):
    """A runner of the steps of `fit` on replicas."""

    # Whether a step is traced, so that its batch may have no values yet.
    traces_steps = False
    # Whether `run` is given the places of a step's random draws, to split a
    # batch unevenly that shows which axes have rows.
    looks_at_draws = False

    def compiled_step(
        self,
        name: str,
        run: Callable[[keras.Model, Any], Any],
        is_of_keras: Callable[[keras.Model], bool],
    ) -> Callable[[keras.Model, Any], Any]:
        """Returns what runs a step of models, compiled if it can be.

        Args:
            name: String, the step's name: one of `STEPS`.
            run: Callable that runs the step of a model on a global batch, as it
                is written, by `run` of this object.
            is_of_keras: Callable that tells whether a model's step is Keras'
                own.
        """
        return run

    @abstractmethod
    def run(
        self,
        fn: Callable[[Replica, Any], T],
        batch: object,
        *,
        places: Places | None = None,
    ) -> list[T]:
        """Splits a global batch and calls `fn(replica, part)` on each replica.

        Args:
            fn: Callable. May use the replica's collectives.
            batch: Nested structure of arrays, rows along axis 0. Each replica
                gets all of the leaves without rows.
            places: The step's `keras_dist.plugin.places.Places`, given to
                runners that ask for them by `looks_at_draws`.

        Returns:
            List of the replicas' results, replica 0 first. Replicas without
            rows may be left out.
        """

    def build(self, model: keras.Model, step: str, batch: object) -> None:
        """Builds a model before a step of it runs, if Keras has not done so.

        Args:
            model: A `keras.Model`.
            step: String, the step's name: one of `STEPS`.
            batch: The global batch, as for `run`.
        """
        return  # AutoGraph can't convert a function without a statement
