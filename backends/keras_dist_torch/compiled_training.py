"""Training steps of a worker's only replica, in two compiled graphs.

    [forward, loss, what metrics add] > backward > one sum > [update, logs]

Batches of a shape run as without `jit_compile` until that has come twice in a
row. The second one is looked at: a step is compiled if it needs the other
workers for nothing but gradients, numbers of metrics, and sums in layers.
"""

import functools
import random
import re
import threading
import types
import warnings
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import torch

from keras_dist.plugins import CompiledStep
from keras_dist.plugins import RowShard
from keras_dist.plugins import all_metrics
from keras_dist.plugins import bounds
from keras_dist.plugins import leaves_of
from keras_dist.plugins import map_nest
from keras_dist_torch.buckets import Bucket
from keras_dist_torch.buckets import Overlap
from keras_dist_torch.buckets import order_of
from keras_dist_torch.compiled_replica import CompiledReplica
from keras_dist_torch.compiled_replica import refuse
from keras_dist_torch.gradients import plain_grad
from keras_dist_torch.keras_internals import learning_rate_known
from keras_dist_torch.keras_internals import tensor_of
from keras_dist_torch.look import looking
from keras_dist_torch.replica import cut
from keras_dist_torch.replica import lengths_of
from keras_dist_torch.torch_internals import config

# How many shapes of batches have graphs, and how many steps are looked at that
# can't be compiled.
_MOST_GRAPHS = 4
_MOST_LOOKS = 4

Run = Callable[[keras.Model, Any], Any]


class CompiledTraining:
    """A model's training step, which is compiled if `jit_compile` is set."""

    def __init__(
        self,
        executor: Any,
        run: Run,
        is_of_keras: Callable[[keras.Model], bool],
    ) -> None:
        self._executor = executor
        # Runs a step as it is written.
        self._run = run
        self._is_of_keras = is_of_keras
        # By the shapes of batches, and the variables that are trained.
        self._graphs: dict[Any, _Graphs] = {}
        self._made_for: tuple[Any, Any] = (None, None)
        self._key: Any = None
        self._num_problems = 0
        self._is_off = False

    def __call__(self, model: keras.Model, data: Any) -> Any:
        if not model.jit_compile:
            return self._run(model, data)
        made_for = model.train_function, model.optimizer
        if made_for != self._made_for:
            self._begin(model, made_for)  # `compile` was called
        if self._is_off:
            return self._run(model, data)
        key = (
            *[
                (getattr(leaf, "shape", None), getattr(leaf, "dtype", None))
                for leaf in leaves_of(data)
            ],
            *map(id, model.trainable_variables),
            # Keras has a state for each thread, which is in graphs.
            threading.get_ident(),
        )
        is_again, self._key = key == self._key, key
        graphs = self._graphs.get(key)
        if graphs is not None and graphs.may_run():
            return graphs.run(data)
        is_new = graphs is None and len(self._graphs) < _MOST_GRAPHS
        if is_new and is_again and self._may_split(data):
            return self._run_looking(model, data, key)
        return self._run(model, data)

    def _begin(self, model: keras.Model, made_for: tuple[Any, Any]) -> None:
        self._graphs.clear()
        self._made_for = made_for
        self._key, self._num_problems, self._is_off = None, 0, False
        problem = self._executor.compiling_problem or self._problem_of(model)
        if problem:
            self._give_up(model, problem)

    def _may_split(self, data: Any) -> bool:
        """Returns whether each worker gets rows of a batch."""
        lengths = set(lengths_of(data))
        return (
            len(lengths) == 1
            and min(lengths) >= self._executor.plan.num_replicas
        )

    def _problem_of(self, model: keras.Model) -> str:
        if not self._is_of_keras(model):
            return "its `train_step`, or a method for metrics, is your own"
        optimizer = model.optimizer
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            return "its loss is scaled (`LossScaleOptimizer`)"
        if optimizer.gradient_accumulation_steps:
            return "its optimizer has `gradient_accumulation_steps`"
        if optimizer.use_ema and optimizer.ema_overwrite_frequency:
            return "its optimizer has an `ema_overwrite_frequency`"
        return ""

    def _run_looking(self, model: keras.Model, data: Any, key: Any) -> Any:
        workers = self._executor.workers
        with looking(workers) as look:
            result = self._run(model, data)
        problem = look.problem or problem_of_compiler(self._executor.device)
        with workers.step("`train_step`"):
            # All workers have to do the same.
            problem = next(filter(None, workers.texts(problem)), "")
        if not problem:
            rows = lengths_of(data)[0]
            executor, num_masks = self._executor, look.num_masks
            self._graphs[key] = _Graphs(model, executor, rows, num_masks)
            return result
        self._num_problems += 1
        # The first steps may have more to find out.
        if self._num_problems == _MOST_LOOKS or not look.problem:
            self._give_up(model, problem)
        return result

    def _give_up(self, model: keras.Model, problem: str) -> None:
        self._is_off = True
        if self._executor.plan.is_chief:
            warnings.warn(
                f"The training step of model '{model.name}' is not compiled: "
                f"{problem}. Received: jit_compile=True on "
                f"{self._executor.plan.num_replicas} replicas. The step runs "
                "operation by operation, and gives the same numbers. Pass "
                "`jit_compile=False` to `compile` to silence this.",
                stacklevel=2,
            )


class _Graphs:
    """The graphs of a step for batches of one shape."""

    def __init__(
        self, model: Any, executor: Any, total: int, num_masks: int
    ) -> None:
        plan, workers = executor.plan, executor.workers
        first = plan.first_replica
        start, stop = bounds(total, plan.num_replicas)[first : first + 2]
        share = RowShard(stop - start, total, start)
        self._rows = slice(start, stop)
        self._model = model
        self._workers, self._device = workers, executor.device
        strategy = model.trainable_variables[0].distribute_strategy
        replica = CompiledReplica(share, workers, first)
        self._step = CompiledStep(replica, strategy)
        variables = list(model.trainable_variables)
        self._parameters = [tensor_of(variable) for variable in variables]
        self._order = order_of(variables, workers.options)
        self._overlap = Overlap(workers, self._device)
        # By the first position in a bucket, what is summed.
        self._flats: dict[int, torch.Tensor] = {}
        # Some optimizers make a number of the rate: it may change.
        self._as_number = config.patch(capture_scalar_outputs=True)
        by_id = {
            id(variable): variable
            for metric in all_metrics(model)
            for variable in metric.variables
        }
        counted = [*by_id.values()]
        self._num_counted = len(counted)
        self._forward = _compiled(
            _forward_of(model, self._step, replica, counted, num_masks)
        )
        self._update = _compiled(
            _update_of(model, variables, counted, self._order),
            # Else a step's scalars are computed again and again in its loops.
            realize_opcount_threshold=8,
        )

    def may_run(self) -> bool:
        """Returns whether nothing has changed that other steps refuse."""
        return not any(
            parameter._backward_hooks or parameter._post_accumulate_grad_hooks
            for parameter in self._parameters
        )

    def run(self, data: Any) -> Any:
        """Runs a step on this worker's rows of a global batch."""
        part = map_nest(_tensor, cut(data, self._rows, self._device))
        given = keras.utils.unpack_x_y_sample_weight(part)
        with self._workers.step("`train_step`"), self._step:
            self._model._clear_losses()
            loss, numbers, _ = self._forward(*given)
            gradients = plain_grad(loss, self._parameters, allow_unused=True)
            buckets = self._summed(gradients, numbers)
            flats = [bucket.flat for bucket in buckets]
            # Of any worker: code that looks at values may leave some out.
            present = [tuple(map(bool, bucket.present)) for bucket in buckets]
            self._step.is_updating = True
            with learning_rate_known(self._model.optimizer), self._as_number:
                return self._update(flats, present)

    def _summed(
        self, gradients: Sequence[torch.Tensor | None], numbers: torch.Tensor
    ) -> list[Bucket]:
        """Sums gradients and numbers over workers."""
        order = self._order

        def made(positions: list[int], numbers: Sequence[Any] = ()) -> Bucket:
            # The same memory in each step: new pages take long to get.
            first = positions[0]
            bucket = Bucket.of(
                order,
                positions,
                [gradients[position] for position in positions],
                1.0,  # The loss has this replica's weight.
                self._device,
                self._workers,
                numbers=numbers,
                out=self._flats.get(first),
            )
            self._flats[first] = bucket.flat
            return bucket

        with torch.no_grad():
            final = made(order.buckets[-1], numbers.unbind())
            count = self._num_counted
            return self._overlap.finished(order, made, final, count)


def _forward_of(
    model: Any,
    step: CompiledStep,
    replica: CompiledReplica,
    counted: Sequence[keras.Variable],
    num_masks: int,
) -> Callable[..., Any]:
    """Returns a function from a worker's rows to its share of the loss, and to
    what its metrics add to their variables.

    The last mask of a dropout is a third result: else a graph would leave out
    one that nothing uses, and the generator would not go on.
    """
    takes_training = {"training": True} if model._call_has_training_arg else {}
    metrics, rows = model._compile_metrics, step.share.rows
    weight = step.share.weight

    def forward(x: Any, y: Any, sample_weight: Any) -> tuple[Any, Any, Any]:
        additions: list[tuple[keras.Variable, Any]] = []
        step.additions, replica.mask, replica.num_masks = additions, None, 0
        y_pred = model(x, **takes_training)
        loss = model._compute_loss(
            x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True
        )
        with torch.no_grad():
            model._loss_tracker.update_state(loss.detach(), sample_weight=rows)
            if metrics is not None:
                metrics.update_state(y, y_pred, sample_weight)
            mask, replica.mask, step.additions = replica.mask, None, None
            numbers, num_added = [], 0
            for variable in counted:
                number = torch.zeros((), device=loss.device)
                for added_to, value in additions:
                    if added_to is variable:
                        number = number + value
                        num_added += 1
                numbers.append(number.float())
            if num_added < len(additions):
                refuse("an assignment to a variable of no metric")
            if replica.num_masks > num_masks:
                refuse("another dropout")
        scaled = model.optimizer.scale_loss(loss) * weight
        return scaled, torch.stack(numbers), mask

    return forward


def _update_of(
    model: Any,
    variables: Sequence[keras.Variable],
    counted: Sequence[keras.Variable],
    order: Any,
) -> Callable[..., Any]:
    """Returns a function that applies sums, and returns the step's logs."""
    sizes = [
        [order.likes[position][0].numel() for position in positions]
        for positions in order.buckets
    ]

    def update(flats: Sequence[Any], present: Sequence[Any]) -> Any:
        gradients: list[Any] = [None] * len(variables)
        for flat, are_present, positions, lengths in zip(
            flats, present, order.buckets, sizes, strict=True
        ):
            rest = flat.numel() - sum(lengths)
            *parts, last = flat.split([*lengths, rest])
            for position, is_present, part in zip(
                positions, are_present, parts, strict=True
            ):
                if is_present:
                    shape = order.likes[position][0]
                    gradients[position] = part.view(shape)
        with torch.no_grad():
            model.optimizer.apply(gradients, variables)
            numbers = last[len(positions) + 1 : -1].unbind()
            for variable, number in zip(counted, numbers, strict=True):
                variable.assign_add(number)
            return model.get_metrics_result()

    return update


def _tensor(leaf: Any) -> Any:
    """Returns an array as a tensor, of `train_on_batch`."""
    is_number = isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biuf"
    return torch.as_tensor(leaf) if is_number else leaf


def _compiled(function: Any, **options: Any) -> Any:
    """Compiles a function, with a code of its own: that holds the graphs."""
    own = types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    options |= {"guard_filter_fn": _guards}
    return torch.compile(own, dynamic=False, options=options)


# The names of what modules of libraries hold, which nobody replaces.
_LIBRARIES = re.compile(
    r"G\['__(import_(keras_dot_src|torch|keras_dist(_torch)?)(_dot_|'\])"
    r"|builtins)"
)


def _guards(entries: Sequence[Any]) -> list[bool]:
    """Returns which conditions of a graph are checked before each step."""
    return [
        not _LIBRARIES.match(entry.name) or "_dot_config'" in entry.name
        for entry in entries
    ]


@functools.cache
def problem_of_compiler(device: torch.device) -> str:
    """Returns why PyTorch's compiler does not work here, or nothing."""
    # One that was not compiled before: what it made may be in a cache.
    number = random.SystemRandom().random()
    try:
        torch.compile(lambda x: x * number)(torch.ones(2, device=device))
    except Exception as error:
        text = str(error).strip().splitlines() or [type(error).__name__]
        return f"PyTorch's compiler does not work on a worker ({text[0]})"
    return ""
