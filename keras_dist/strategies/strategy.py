"""Strategy: the public class that distributes models by a plan."""

import contextlib
import os
import threading
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING
from typing import Any
from typing import NoReturn

import keras

from keras_dist.core import context
from keras_dist.core.options import InputContext
from keras_dist.core.options import InputOptions
from keras_dist.core.options import ValueContext
from keras_dist.core.plan import Plan
from keras_dist.core.reduction import ReduceOp
from keras_dist.core.strategy_classes import check_arguments
from keras_dist.core.strategy_classes import scope_method
from keras_dist.fit.binding import bind_model
from keras_dist.fit.binding import claim_variable
from keras_dist.fit.hooks import watch_training
from keras_dist.fit.profile import StepProfile
from keras_dist.fit.workers import loops
from keras_dist.inputs.dataset import distribute_dataset
from keras_dist.inputs.dataset import distribute_from_function
from keras_dist.inputs.own_rows.tf_data import own_rows
from keras_dist.inputs.sources.numpy_data import numpy_dataset
from keras_dist.internals import keras_internals
from keras_dist.internals import keras_random
from keras_dist.plugin.backend import get_backend
from keras_dist.plugin.capabilities import executor_of
from keras_dist.plugin.chief_only import check_all_come
from keras_dist.plugin.recorder import of_its_own
from keras_dist.replica.function import Function
from keras_dist.replica.gradients import check_run_counts
from keras_dist.replica.gradients import current
from keras_dist.replica.running import run_uncompiled
from keras_dist.strategies import logical_devices
from keras_dist.strategies import reductions
from keras_dist.strategies.cross_device_ops import CrossDeviceOps
from keras_dist.strategies.deprecated import DeprecatedMethods
from keras_dist.strategies.extended import StrategyExtended

if TYPE_CHECKING:
    from keras_dist.inputs.explain import Explanation
    from keras_dist.verification.report import Report


class _OpenedScopes(threading.local):
    def __init__(self) -> None:
        # Each with the device that was the default one inside, and with
        # the session that knew it.
        self.managers: list[tuple[Any, Any, object]] = []


class Scope(contextlib.AbstractContextManager["Strategy"]):
    """A strategy's scope; it can be entered again, nested, in any thread."""

    def __init__(self, strategy: "Strategy") -> None:
        self._strategy = strategy
        self._opened = _OpenedScopes()

    def __enter__(self) -> "Strategy":
        manager = self._strategy._entered_scope()
        strategy = manager.__enter__()
        device = self._strategy.executor.default_device()
        self._opened.managers.append(
            (manager, device, keras_internals.session())
        )
        return strategy

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        manager, device, session = self._opened.managers[-1]
        now = self._strategy.executor.default_device()
        # Keras' session may hold the default device; clearing the session
        # then resets it.
        is_forgotten = now is None and session is not keras_internals.session()
        if kind is None and now != device and not is_forgotten:
            raise RuntimeError(
                "Device scope nesting error: a device scope that was opened "
                "inside of `strategy.scope()` is still open.\nReceived: "
                f"{now!r} is the default device. Expected: {device!r}. Leave "
                "the inner `with` first."
            )
        self._opened.managers.pop()
        suppresses: bool | None = manager.__exit__(kind, error, traceback)
        return suppresses


class Strategy(DeprecatedMethods):
    """A distribution of computation and variables over devices.

    Use one of the subclasses, or pass your own `Plan`.

    Args:
        plan: A `Plan` of the devices that compute and hold variables.
        cross_device_ops: A `CrossDeviceOps`, or `None` for the backend's own.

    Example:

    >>> from keras_dist.plugins import Device, Plan
    >>> cpu = Device("cpu", 0)
    >>> strategy = keras_dist.Strategy(Plan(((cpu,),), (cpu,)))
    >>> strategy.num_replicas_in_sync
    1
    """

    def __init__(
        self, plan: Plan, cross_device_ops: CrossDeviceOps | None = None
    ) -> None:
        super().__init__(plan, executor_of(plan), cross_device_ops)
        watch_training(self)

    @staticmethod
    def from_native(strategy: object) -> "Strategy":
        """Creates a strategy with the devices of a native strategy.

        The two strategies use the same devices, but share no variables.

        Args:
            strategy: On TensorFlow, a `tf.distribute.MirroredStrategy` or
                `tf.distribute.OneDeviceStrategy`.

        Returns:
            A `Strategy` with the same replicas and devices.

        Raises:
            TypeError: If `strategy` is any other object, such as a
                `tf.distribute.TPUStrategy`, or if the backend has no native
                strategies.
        """
        return Strategy(get_backend().plan_of_native(strategy))

    def __new__(cls, *args: Any, **kwargs: Any) -> "Strategy":
        check_arguments(cls, args, kwargs)
        return super().__new__(cls)

    @scope_method
    def scope(self) -> contextlib.AbstractContextManager["Strategy"]:
        """Returns a context that distributes models, optimizers, variables.

        The strategy distributes those that are made in the context. A model
        remembers its strategy, so you can call its methods, such as `fit`,
        inside or outside of the scope, in any thread.

        Returns:
            A context manager that yields the strategy. It can be nested and
            entered again.

        Raises:
            StrategyMismatchError: If another strategy's scope is open.

        Example:

        >>> strategy = keras_dist.MirroredStrategy(["cpu:0"])
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.layers.Dense(1)])
        ...     model.compile("sgd", "mse")
        """
        return Scope(self)

    @contextlib.contextmanager
    def _entered_scope(self) -> Iterator["Strategy"]:
        context.check_no_distribution(self, "the scope")
        with (
            keras_random.global_seed_lent(),
            context.entered(self),
            self.executor.hooks,
            self.executor.creation_scope(),
        ):
            yield self

    def distribute(self, model: keras.Model) -> keras.Model:
        """Brings a model made outside of the scope under this strategy.

        The values of its variables stay the same.

        Args:
            model: A `keras.Model`, built or not, compiled or not.

        Returns:
            The same model.

        Raises:
            StrategyMismatchError: If the model belongs to another strategy.

        Example:

        >>> model = keras.Sequential([keras.layers.Dense(1)])
        >>> strategy = keras_dist.MirroredStrategy(["cpu:0"])
        >>> strategy.distribute(model) is model
        True
        """
        if not isinstance(model, keras_internals.Trainer):
            raise ValueError(
                "`distribute` takes a `keras.Model`. Received: "
                f"{model!r} of type {type(model).__name__}."
            )
        bind_model(model, self).claim()
        return model

    def devices_of(self, variable: keras.Variable) -> tuple[str, ...]:
        """Returns the names of the devices that hold a copy of a variable.

        Args:
            variable: A `keras.Variable` that belongs to this strategy.

        Returns:
            Tuple of strings such as `("cpu:0", "cpu:1")`. The first is the
            primary device, whose copy is saved.

        Raises:
            StrategyMismatchError: If the variable belongs to another strategy.

        Example:

        >>> strategy = keras_dist.OneDeviceStrategy("cpu:0")
        >>> with strategy.scope():
        ...     variable = keras.Variable(1.0)
        >>> strategy.devices_of(variable)
        ('cpu:0',)
        """
        claim_variable(variable, self)
        return tuple(map(str, self.executor.storage(variable).devices))

    @property
    def extended(self) -> StrategyExtended:
        """The `StrategyExtended`: methods that few programs need."""
        return StrategyExtended(self)

    @property
    def cluster_resolver(self) -> Any:
        """The `ClusterResolver` in use; `None` on one worker."""
        return None

    @of_its_own("`run`")
    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: object = None,
    ) -> Any:
        """Calls `fn` once for each replica, on its device.

        Args:
            fn: Callable. Inside of it, `keras_dist.get_replica_context()`
                returns the replica's context.
            args: List or tuple of positional arguments. Each replica gets its
                own component of each `PerReplica` value, at any depth. Other
                arguments are passed as they are.
            kwargs: Dict of keyword arguments, treated in the same way.
            options: `RunOptions`, which are ignored. The argument exists for
                programs written for TPUs.

        Returns:
            Nest like the result of `fn`, with a `PerReplica` in place of each
            leaf, unless the leaf is the same object on each replica. With one
            replica, it is the result of `fn` itself.

        Raises:
            ValueError: If `args` is neither a list nor a tuple, or if
                replicas return different structures.
            ReplicaDivergenceError: If replicas make different collective
                calls.
            UnsupportedModelError: If there are several replicas, and `run` is
                called in a function that is differentiated or in a
                `keras.StatelessScope`. Differentiate in `fn` instead.
            BaseException: If a replica raises an exception. It is the first
                one, with a note that names the replica. No variable is left
                partly written.

        Example:

        >>> strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> x = keras_dist.PerReplica([1, 2])
        >>> strategy.run(lambda x, y: x + y, args=(x, 10))
        PerReplica:{
          0: 11,
          1: 12
        }
        """
        if (
            current.depth or keras_internals.stateless_scope() is not None
        ) and self.plan.num_replicas > 1:
            context.check_cross_replica(self, "run")
            check_run_counts(self)
        self.has_run = True
        workers = self.executor.workers
        if workers is not None:
            check_all_come("`strategy.run`")
            if not workers.is_open:
                with loops.in_run(workers, fn):
                    return self.run(fn, args, kwargs)
        compiler = self.executor.compiler
        if compiler is not None and (
            isinstance(fn, Function) or compiler.is_tracing
        ):
            return compiler.run(self, fn, args, kwargs)
        return run_uncompiled(self, fn, args, kwargs)

    def reduce(
        self, reduce_op: ReduceOp | str, value: object, axis: object
    ) -> Any:
        """Combines a value over replicas, and along axes if `axis` is given.

        Args:
            reduce_op: `ReduceOp`, or its name in any case.
            value: Nest of per-replica values, such as a result of `run`. Any
                other value counts as equal on each replica. It has a mean,
                but no sum.
            axis: `None` combines element by element, and all shapes must be
                equal. An integer or a list of integers also combines the
                elements along these axes. Then a replica with more rows weighs
                more in a mean.

        Returns:
            Nest of tensors on the first replica's device. A mean of integers
            is a float. Sums of booleans are counts.

        Raises:
            ValueError: If the operation or the axis does not exist, or if
                shapes differ.
            TypeError: If `reduce_op` is not an operation, or if a value is not
                a number.

        Example:

        >>> strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> value = keras_dist.PerReplica([[1.0, 2.0], [6.0]])
        >>> float(strategy.reduce("MEAN", value, axis=0))
        3.0
        """
        return reductions.reduce(self, reduce_op, value, axis)

    def gather(self, value: object, axis: int) -> Any:
        """Concatenates the replicas' values along an axis, in replica order.

        Args:
            value: Nest of per-replica values with at least one axis, of any
                dtype. Any other value is returned as it is.
            axis: Integer, the axis to concatenate along. Sizes along this
                axis may differ between replicas. Negative integers count from
                the end.

        Returns:
            Nest of tensors on the first replica's device.

        Raises:
            ValueError: If ranks, or sizes along other axes, differ.
            NotImplementedError: If a value is sparse.
            RuntimeError: If called in replica context. Use `all_gather` there.

        Example:

        >>> strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> value = keras_dist.PerReplica([[1, 2], [3]])
        >>> keras.ops.convert_to_numpy(strategy.gather(value, axis=0))
        array([1, 2, 3], dtype=int32)
        """
        return reductions.gather(self, value, axis)

    def experimental_local_results(self, value: object) -> tuple[Any, ...]:
        """Returns the components of a per-replica value on this worker.

        Args:
            value: Nest of per-replica values, such as a result of `run`.

        Returns:
            Tuple with a nest for each replica of this worker. If the value is
            not distributed, or with one replica, the tuple has only that
            value.

        Example:

        >>> strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> value = keras_dist.PerReplica([1, 2])
        >>> strategy.experimental_local_results({"a": value})
        ({'a': 1}, {'a': 2})
        """
        return reductions.local_results(self, value)

    def experimental_distribute_values_from_function(
        self, value_fn: Callable[[ValueContext], Any]
    ) -> Any:
        """Makes a per-replica value from a function of the replica.

        Args:
            value_fn: Callable that takes a
                `keras_dist.experimental.ValueContext`. It is called once for
                each replica of this worker.

        Returns:
            `PerReplica` of the results, even if they are equal. With one
            replica, it is the result itself.

        Example:

        >>> strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> strategy.experimental_distribute_values_from_function(
        ...     lambda context: context.replica_id_in_sync_group
        ... )
        PerReplica:{
          0: 0,
          1: 1
        }
        """
        return reductions.values_from_function(self, value_fn)

    def experimental_distribute_dataset(
        self, dataset: object, options: InputOptions | None = None
    ) -> Any:
        """Splits the batches of a dataset over the replicas.

        With `N` replicas on all workers together, replica `r` gets the rows
        from `ceil(n * r / N)` up to `ceil(n * (r + 1) / N)` of a batch of `n`
        rows.

        Pass the same data on each worker. Each worker gets the parts of its
        own replicas. The options of a `tf.data.Dataset` can choose another
        policy, see `keras_dist.AutoShardPolicy`.

        Args:
            dataset: Data in batches of the global batch size: a
                `tf.data.Dataset`, `keras.utils.PyDataset`, torch
                `DataLoader`, grain dataset or loader, an iterable of batches,
                or a function without arguments that returns one. A batch is an
                array, or a nest of arrays.
            options: `InputOptions`, or `None` for the defaults.

        Returns:
            A `DistributedDataset`, whose elements are batches with a
            `PerReplica` in place of each array. `fit` accepts it too.

        Raises:
            ValueError: If the data is not batched, or if options contradict
                each other.
            NotImplementedError: If the options request a separate dataset for
                each replica.

        Example:

        >>> strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> batches = [np.arange(4), np.arange(4, 7)]
        >>> dataset = strategy.experimental_distribute_dataset(batches)
        >>> [int(strategy.reduce("SUM", x, axis=0)) for x in dataset]
        [6, 15]
        """
        context.check_cross_replica(self, "experimental_distribute_dataset")
        return distribute_dataset(self, dataset, options)

    def own_rows(
        self,
        batch_size: int,
        map_func: Callable[..., Any] | None = None,
        *,
        num_parallel_calls: int | None = None,
        drop_remainder: bool = False,
    ) -> Callable[[Any], Any]:
        """Returns a transformation of `tf.data` by which workers load own rows.

        It takes the place of `map(map_func).batch(batch_size)` at the end of a
        pipeline for `fit`, `evaluate` or `predict`. With several workers, each
        calls `map_func` for the rows of its own replicas only. What comes
        before, such as a list of files that is shuffled, is read by all. With
        one worker, it is `map` and `batch`.

        Args:
            batch_size: Integer, the rows of a global batch.
            map_func: Callable from an element to the row of a batch, as for
                `tf.data.Dataset.map`; by default, elements are the rows.
            num_parallel_calls: Integer, `tf.data.AUTOTUNE` or `None`, as for
                `tf.data.Dataset.map`. With several workers, it counts batches.
            drop_remainder: Boolean, whether an incomplete last batch is left
                out.

        Returns:
            A callable for `tf.data.Dataset.apply`.

        Raises:
            ValueError: If `batch_size` is not positive.

        Example:

        >>> import tensorflow as tf
        >>> strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> files = tf.data.Dataset.range(5).shuffle(5, seed=1)
        >>> images = files.apply(
        ...     strategy.own_rows(4, lambda file: tf.fill([2], file))
        ... )
        >>> [tuple(batch.shape) for batch in images]
        [(4, 2), (1, 2)]
        """
        return own_rows(
            self.executor,
            batch_size,
            map_func,
            num_parallel_calls,
            drop_remainder,
        )

    def distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[InputContext], Any],
        options: InputOptions | None = None,
    ) -> Any:
        """Distributes the batches of datasets that a function makes.

        Each batch goes to one replica. If the last step has too few batches,
        the other replicas get arrays with 0 rows. But if all batches have the
        same static number of rows (`drop_remainder=True`), that step is left
        out.

        Args:
            dataset_fn: Callable from an `InputContext` to data in batches of
                the per-replica size. It is called once on each worker, and
                the worker's replicas take batches in turn. A worker with less
                data gets batches with 0 rows at the end. The result must
                depend only on the context, because `fit` also calls the
                function for the other workers. It does not if the data is of
                `tf.data` or NumPy, with `drop_remainder=True`, and has as
                many batches on each worker.
            options: `InputOptions`, or `None` for the defaults. With
                `InputReplicationMode.PER_REPLICA`, the function is called for
                each replica, and each replica reads its own data.

        Returns:
            A `DistributedDataset`.

        Raises:
            ValueError: If the data can't be read, or if options contradict
                each other.

        Example:

        >>> strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> dataset = strategy.distribute_datasets_from_function(
        ...     lambda context: [np.ones(2), np.zeros(2)]
        ... )
        >>> next(iter(dataset)).values[1].shape[0]
        2
        """
        context.check_cross_replica(self, "distribute_datasets_from_function")
        return distribute_from_function(self, dataset_fn, options)

    def experimental_make_numpy_dataset(
        self, numpy_input: object, session: object = None
    ) -> Any:
        """Makes a dataset of the rows of arrays.

        Args:
            numpy_input: NumPy array, or nest of arrays of the same length.
                The dataset copies the arrays.
            session: Ignored; it belongs to TensorFlow 1.

        Returns:
            An iterable of rows with a method `batch(batch_size)`, which
            returns data for `experimental_distribute_dataset`. If TensorFlow
            is installed, it also has the other methods of a
            `tf.data.Dataset`; each returns a `tf.data.Dataset`.

        Example:

        >>> strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> rows = strategy.experimental_make_numpy_dataset(np.arange(4))
        >>> batched = rows.batch(2)
        >>> dataset = strategy.experimental_distribute_dataset(batched)
        >>> len(list(dataset))
        2
        """
        return numpy_dataset(numpy_input)

    def explain(
        self,
        x: object,
        y: object = None,
        sample_weight: object = None,
        batch_size: int | None = None,
    ) -> "Explanation":
        """Explains which rows of the next batch go to which replica.

        For the data of `fit`, it explains how `fit`, `evaluate` and `predict`
        split the first batch. For a distributed dataset, its iterator, or a
        list of batches that are tuples, it explains which rows of the next
        element `strategy.run` passes to each replica. The two differ if the
        backend splits batches in its own way. Row numbers count from the start
        of the batch.

        Data that can be read again loses no batch, and keeps its random
        states. So do a distributed dataset and its iterator. An exception is
        a `DataLoader` or a `tf.data.Dataset` if the backend is another
        framework. Other iterators, such as generators, lose the batch.

        With several workers, all of them have to call `explain` for a
        distributed dataset.

        Args:
            x: Data as for `fit`: an array or nest of arrays, which is one
                batch if there is no `batch_size`; or a `tf.data.Dataset`,
                `PyDataset`, `DataLoader` or iterable of batches. Or a
                `DistributedDataset` or its iterator.
            y: Array or nest of arrays, only if `x` is arrays.
            sample_weight: Array or nest of arrays, only if `x` is arrays.
            batch_size: Integer, the global batch size, only if `x` is arrays.

        Returns:
            An `Explanation`, which you can print. Its `rows` have `worker`,
            `replica`, `device`, `first`, `last`, `num_rows` and `shape` of
            each replica.

        Raises:
            ValueError: If there is no batch, or if arguments contradict each
                other.

        Example:

        >>> strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> explanation = strategy.explain(np.ones((20, 3)), batch_size=5)
        >>> for row in explanation.rows:
        ...     print(row.device, row.first, row.last, row.shape)
        cpu:0 0 2 (3, 3)
        cpu:1 3 4 (2, 3)
        """
        context.check_cross_replica(self, "explain")
        from keras_dist.inputs.explain import explain_data

        return explain_data(self, x, (y, sample_weight), batch_size)

    def verify(
        self,
        model: keras.Model,
        x: object = None,
        y: object = None,
        *,
        sample_weight: object = None,
        class_weight: object = None,
        batch_size: int | None = None,
        steps: int = 3,
    ) -> "Report":
        """Compares a model's training under the strategy with one device.

        `verify` trains two copies of the model, one with plain Keras and one
        under this strategy. Both start with the model's weights and optimizer
        state. Both train on the same batches. One batch has an odd number of
        rows, and one has fewer rows than replicas. `verify` compares
        predictions, an evaluation, the first gradients, and all variables
        after each step, and after one `fit` of all batches. In both copies,
        Keras' random draws are the same for each row.

        The model and all random states stay unchanged. Meanwhile, `verify`
        sets the generators that all threads share, of Python, NumPy and the
        framework: let no other thread draw from them. Gradients and losses
        may differ by 1e-4 of the largest entry in float32 (2e-2 in float16,
        6e-2 in bfloat16). Trained variables may differ by 1e-3 of the change
        by training. To each limit, `verify` adds eight times the change that
        another order of rows makes on one device.

        Args:
            model: A compiled `keras.Model`, under this strategy or none. If
                the model can't be recreated from its configuration, pass a
                function without arguments that creates and compiles it.
            x: Arrays as for `fit`; or batches (a dataset, a list of tuples, an
                iterable). `verify` uses the first `steps` batches.
            y: Arrays of targets, or `None`.
            sample_weight: Arrays of weights, or `None`.
            class_weight: Dict from class to weight, or `None`.
            batch_size: Integer, number of rows of an even batch. The default
                is 4 for each replica.
            steps: Integer of at least 1, number of batches. The default is 3.
                If the replicas share the only batch evenly, `verify` adds an
                uneven one.

        Returns:
            A `keras_dist.verification.report.Report`, which you can print.
            Its `same` is a boolean, `first` is the first difference, and
            `cause` is the likely cause.

        Raises:
            UnsupportedModelError: If the model can't be copied.
            TypeError: If arrays can't be split by rows; sparse tensors are an
                example.
            RuntimeError: Inside of a `strategy.scope()`.

        Example:

        >>> strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> with strategy.scope():
        ...     model = keras.Sequential(
        ...         [keras.Input((3,)), keras.layers.Dense(1)])
        ...     model.compile("sgd", "mse")
        >>> x, y = np.ones((16, 3)), np.ones((16, 1))
        >>> strategy.verify(model, x, y).same
        True
        """
        # A lazy import: only calls of `verify` need these modules.
        from keras_dist.verification.verify import verify

        return verify(
            self, model, x, y, sample_weight, class_weight, batch_size, steps
        )

    def profile(
        self,
        directory: str | os.PathLike[str],
        steps: tuple[int, int] | None = None,
    ) -> StepProfile:
        """Records a profile of a few training steps, or of any code.

        The result is a callback of `fit`, and also a context manager. As a
        callback, it records the given steps, with what runs between them.
        `with strategy.profile(directory):` records all of its body. The
        framework's own profiler records: `jax.profiler`,
        `tf.profiler.experimental` or `torch.profiler`.

        Each worker writes to a folder of its own, such as
        *directory/worker-0*. On JAX and TensorFlow, read the files with
        `tensorboard --logdir directory` and the package
        tensorboard-plugin-profile (or `xprof`). On PyTorch, open the file in
        https://ui.perfetto.dev or chrome://tracing. Steps are events: `train`
        with the number of the step on JAX and TensorFlow, `ProfilerStep#10`
        on PyTorch.

        The first steps compile programs, so that later ones tell more. If
        `fit` fails or ends early, the steps until then are written. Numbers
        stay the same.

        Args:
            directory: Path of the folder for traces. It is made if it isn't
                there.
            steps: Two integers, the first step of the profile and the first
                one after it. Steps of one `fit` are counted from 0, across
                epochs. With `steps_per_execution`, steps of one call are
                recorded together. The default is (10, 20), ten steps. A `with`
                takes no `steps`.

        Returns:
            A `keras.callbacks.Callback` that is a context manager too. Its
            `directory` is the folder of this worker.

        Raises:
            TypeError: If `directory` is no path.
            NotADirectoryError: If `directory` is a file.
            ValueError: If `steps` are not two integers that increase, or if
                they are given and the profile is used with `with`.
            UnsupportedBackendError: If the backend has no profiler.
            RuntimeError: When the recording starts, if another one runs.
            StrategyMismatchError: In `fit`, if the model belongs to another
                strategy.

        Example:

        ```python
        model.fit(x, y, callbacks=[strategy.profile("traces", (10, 20))])

        with strategy.profile("traces"):
            for batch in dataset:
                strategy.run(train_step, args=(batch,))
        ```
        """
        return StepProfile(self, directory, steps)

    @property
    def batches_ahead(self) -> int:
        """Number of batches that `fit` sends to a GPU ahead: 0, 1 or 2.

        It is 1, and can be set before `fit`. Such a batch is read and copied
        while the GPU computes the step before it, and takes memory there. It
        is for arrays on PyTorch with one GPU, in batches of at least 2**20
        numbers: smaller ones are copied faster than a thread can help. JAX
        and TensorFlow copy without waiting, and other data is read when it is
        needed.

        Raises:
            ValueError: If it is set to anything but 0, 1 or 2.

        Example:

        >>> strategy = keras_dist.OneDeviceStrategy("cpu:0")
        >>> strategy.batches_ahead = 2
        """
        return self.executor.batches_ahead

    @batches_ahead.setter
    def batches_ahead(self, number: int) -> None:
        if number not in (0, 1, 2) or isinstance(number, bool):
            raise ValueError(
                "`batches_ahead` is the number of batches that `fit` sends to "
                f"a GPU ahead. Received: {number!r}. Expected: 0, 1 or 2."
            )
        self.executor.batches_ahead = number

    def experimental_assign_to_logical_device(
        self, tensor: object, logical_device_id: int
    ) -> Any:
        """Asks for a tensor to be computed on one logical device.

        It is a hint that no backend follows at present: the logical devices
        of a replica run one program together, and its compiler chooses where
        tensors are.

        Args:
            tensor: Tensor to place.
            logical_device_id: Integer, from 0.

        Returns:
            The tensor, unchanged.

        Raises:
            ValueError: If a replica has no logical device of this number.

        Example:

        >>> strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> strategy.experimental_assign_to_logical_device(1.5, 0)
        1.5
        """
        logical_devices.check_id(self, logical_device_id)
        return tensor

    def experimental_split_to_logical_devices(
        self, tensor: object, partition_dimensions: Sequence[int]
    ) -> Any:
        """Splits a tensor over the logical devices of each replica.

        In `fit`, the tensor has the rows of all replicas, and the rows of a
        replica stay there. Outside of a compiled program, nothing is split.

        Args:
            tensor: Tensor to split.
            partition_dimensions: List or tuple with an integer for each axis,
                the number of parts along that axis.

        Returns:
            The tensor, with the same value.

        Raises:
            ValueError: If there is not one integer for each axis, if an axis
                can't be divided by its integer, or if the product of the
                integers is not the number of logical devices.

        Example:

        >>> strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> x = np.ones((2, 3))
        >>> strategy.experimental_split_to_logical_devices(x, [1, 1]) is x
        True
        """
        return logical_devices.split(self, tensor, partition_dimensions)

    def experimental_replicate_to_logical_devices(self, tensor: object) -> Any:
        """Keeps a copy of a tensor on each logical device of the replica.

        In `fit`, the first axis has the rows of all replicas, and the rows of
        a replica stay there. Outside of a compiled program, nothing is copied.

        Args:
            tensor: Tensor to copy.

        Returns:
            The tensor, with the same value.

        Example:

        >>> strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> strategy.experimental_replicate_to_logical_devices(1.5)
        1.5
        """
        return logical_devices.copy(self, tensor)

    def __enter__(self) -> NoReturn:
        raise TypeError(
            "A strategy is not a context manager, but its scope is. "
            f"Received: `with` of {self!r}. Expected: `with "
            "strategy.scope():`."
        )

    def __exit__(self, *error: object) -> None:
        """Never runs, since `__enter__` raises."""

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "A strategy can't be pickled: it stands for the devices of this "
            f"process.\nReceived: {self!r}. Expected: a strategy made in each "
            "process. Call its constructor there. To pass a model, save it "
            "with `model.save(path)`, and load it in the scope, with "
            "`keras.models.load_model(path)`."
        )

    def __copy__(self) -> "Strategy":
        raise RuntimeError(
            f"Must only deepcopy a strategy. Received: copy.copy({self!r}). "
            "Use the strategy itself, or make another one."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> "Strategy":
        # The copy of a model, for instance, belongs to the same strategy.
        return self

    def __repr__(self) -> str:
        return f"<{type(self).__name__} on {self.plan}>"
