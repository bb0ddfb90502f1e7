"""The methods of a strategy for those who train: speed and checks."""

import os
from typing import TYPE_CHECKING
from typing import Any

from keras_dist.fit.profile import StepProfile
from keras_dist.replica.strategy_core import StrategyBase

if TYPE_CHECKING:
    from keras_dist.verification.report import Report


class TrainingMethods(StrategyBase):
    """The methods of a strategy that look at training, or make it faster."""

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

    def verify(
        self,
        model: Any,
        x: Any = None,
        y: Any = None,
        *,
        sample_weight: Any = None,
        class_weight: Any = None,
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
