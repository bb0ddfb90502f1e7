"""The part of `keras-dist plan --target` that uses Keras."""

import contextlib
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import keras

import keras_dist
from keras_dist.cli.jobs.plan import without_values
from keras_dist.cluster_resolver import ClusterSpec
from keras_dist.cluster_resolver import SimpleClusterResolver
from keras_dist.planning.estimates import Load
from keras_dist.planning.programs import CompiledProgram
from keras_dist.planning.report import Choice
from keras_dist.planning.report import choice_on
from keras_dist.planning.targets import Target
from keras_dist.plugin.backend import get_backend
from keras_dist.plugin.powers import CompilesForTargets
from keras_dist.tools.counting import load_of
from keras_dist.tools.users_function import called
from keras_dist.tools.users_function import function_of
from keras_dist.tools.users_function import told

_ROWS = 32  # of each replica, unless the user says it


def compiled_for(
    spec: str,
    target: Target,
    strategy_name: str | None,
    is_sharded: bool,
    batch_size: int | None,
) -> tuple[list[CompiledProgram], Load, Choice, str]:
    """Compiles the training step of a user's model for a target.

    Returns the programs, the load of the model, the strategy with the
    target's devices, and a description.
    """
    backend = get_backend()
    if not isinstance(backend, CompilesForTargets):
        raise ValueError(
            "--target: only JAX compiles for machines that are not here. "
            f"Received: the backend '{keras.backend.backend()}'. Expected: "
            "--backend jax."
        )
    if target.kind.platform == "cpu":
        # If JAX has started in this process, it has its devices.
        with contextlib.suppress(keras_dist.VirtualDevicesError):
            keras_dist.set_virtual_devices(target.sides[0] * target.sides[1])
    function = function_of(spec)
    with backend.on_target(target) as workers:
        choice = choice_on(target, workers, strategy_name, is_sharded)
        strategy = strategy_of(choice, target)
        rows = batch_size or _ROWS * strategy.num_replicas_in_sync
        with without_values():
            model, batch = _model_of(spec, function, strategy, rows)
            with _explained(spec, batch):
                model._symbolic_build(data_batch=batch)
                strategy.executor.trace_step(model, batch)
            load = load_of(model, model.optimizer)
        programs = backend.compiled()
    count = model.count_params()
    what = f"{spec}, {count:,} parameters, {model.optimizer.name}"
    return programs, load, choice, f"{what}, {rows:,} rows a step"


def strategy_of(choice: Choice, target: Target) -> Any:
    """Makes the chosen strategy on the devices of a target."""
    if choice.strategy == "one-device":
        return keras_dist.OneDeviceStrategy(f"{target.kind.platform}:0")
    state = "sharded" if choice.is_sharded else "mirrored"
    if choice.strategy == "central":
        return keras_dist.CentralStorageStrategy()
    if choice.strategy == "mirrored":
        return keras_dist.MirroredStrategy(optimizer_state=state)
    tasks = [f"host{index}:1" for index in range(choice.workers or 1)]
    resolver = SimpleClusterResolver(
        ClusterSpec({"worker": tasks}), task_type="worker", task_id=0
    )
    return keras_dist.MultiWorkerMirroredStrategy(
        resolver, optimizer_state=state
    )


def _model_of(
    spec: str, function: Callable[[], Any], strategy: Any, rows: int
) -> tuple[keras.Model, tuple[Any, Any]]:
    """Makes the model under a strategy, and describes a batch for it."""
    with strategy.scope():
        given = called(spec, function)
    model, *data = given if isinstance(given, tuple) and given else (given,)
    if not isinstance(model, keras.Model) or not model.compiled:
        raise ValueError(
            f"--model {spec}: the function must return a compiled model to "
            f"compile its step for a target. Received: {model!r}. Expected: a "
            "`keras.Model`, after `model.compile` with an optimizer and a "
            "loss, alone or in a tuple (model, x, y)."
        )
    if len(data) == 2:
        x, y = (keras.tree.map_structure(_Rows(rows).of, d) for d in data)
    else:
        x, y = _inputs_of(spec, model, rows), _labels_of(model, rows)
    return model, (x, y)


class _Rows:
    """Describes batches with a number of rows."""

    def __init__(self, rows: int) -> None:
        self._rows = rows

    def of(self, array: Any) -> keras.KerasTensor:
        """Describes a batch of rows like those of an array or a tensor."""
        dtype = keras.backend.standardize_dtype(array.dtype)
        # As `fit` does with arrays of NumPy.
        dtype = {"float64": keras.config.floatx(), "int64": "int32"}.get(
            dtype, dtype
        )
        return keras.KerasTensor((self._rows, *array.shape[1:]), dtype)


def _inputs_of(spec: str, model: keras.Model, rows: int) -> Any:
    inputs = _nest_of(model, "input")
    leaves = keras.tree.flatten(inputs)
    if not leaves or any(None in leaf.shape[1:] for leaf in leaves):
        shapes = [tuple(leaf.shape) for leaf in leaves]
        raise ValueError(
            f"--model {spec}: the size of a batch is not known. Received: a "
            f"model with inputs of shapes {shapes}. Expected: inputs of which "
            "only the first size is open, or a function that returns "
            "(model, x, y) with arrays of the right shapes."
        )
    return keras.tree.map_structure(_Rows(rows).of, inputs)


def _nest_of(model: keras.Model, name: str) -> Any:
    """Returns the tensors of a model's inputs or outputs, in their nest."""
    nest = getattr(model, name, None)  # a functional model's
    if nest is not None:
        return nest
    tensors = getattr(model, f"{name}s", None) or []
    return tensors[0] if len(tensors) == 1 else tensors


def _labels_of(model: keras.Model, rows: int) -> Any:
    """Describes labels: classes for a sparse loss, else as the outputs are."""
    like = _Rows(rows).of

    def described(output: Any, loss: Any) -> keras.KerasTensor:
        name = loss if isinstance(loss, str) else getattr(loss, "name", "")
        name = name or getattr(loss, "__name__", "")
        if "sparse" in name.lower():
            return keras.KerasTensor((rows, *output.shape[1:-1]), "int32")
        return like(output)

    outputs, losses = _nest_of(model, "output"), model.loss
    if isinstance(losses, dict) and isinstance(outputs, dict):
        return {
            key: described(each, losses.get(key))
            for key, each in outputs.items()
        }
    if isinstance(outputs, (list, tuple)):
        many = isinstance(losses, (list, tuple))
        several = losses if many else [losses] * len(outputs)
        return [*map(described, outputs, several)]
    return keras.tree.map_structure(lambda o: described(o, losses), outputs)


@contextlib.contextmanager
def _explained(spec: str, batch: tuple[Any, Any]) -> Iterator[None]:
    """Names the shapes of the batch in the errors of a model and its loss."""
    try:
        yield
    except keras_dist.KerasDistError:
        raise
    except Exception as error:
        shapes = [tuple(leaf.shape) for leaf in keras.tree.flatten(batch)]
        raise ValueError(
            f"--model {spec}: the training step can't be traced for a batch "
            f"of shapes {shapes}: {told(error)} If the shapes are wrong, "
            "return (model, x, y), with arrays of the right shapes."
        ) from error
