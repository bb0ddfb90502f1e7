"""The part of `keras-dist plan --target` that uses Keras."""

import contextlib
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any

import keras

import keras_dist
from keras_dist.cli.jobs.plan import is_numeric
from keras_dist.cli.jobs.plan import kind_of
from keras_dist.cli.jobs.plan import like_data
from keras_dist.cli.jobs.plan import rows_like
from keras_dist.cli.jobs.plan import without_values
from keras_dist.cluster_resolver import ClusterSpec
from keras_dist.cluster_resolver import SimpleClusterResolver
from keras_dist.planning.estimates import ALL_SPLIT
from keras_dist.planning.estimates import SLOTS_SPLIT
from keras_dist.planning.estimates import Load
from keras_dist.planning.programs import CompiledProgram
from keras_dist.planning.report import Choice
from keras_dist.planning.report import choice_on
from keras_dist.planning.targets import Target
from keras_dist.plugin.backend import get_backend
from keras_dist.plugin.capabilities import CompilesForTargets
from keras_dist.tools.counting import load_of
from keras_dist.tools.users_function import called
from keras_dist.tools.users_function import error_line
from keras_dist.tools.users_function import function_of

_ROWS = 32  # of each replica, unless the user says it
# Arguments of strategies that split variables over the replicas.
_ARGUMENTS = {SLOTS_SPLIT: "optimizer_state", ALL_SPLIT: "variables"}
# What the user's function may return after the model.
_PARTS = ("x", "y", "sample_weight")


def compiled_for(
    spec: str,
    target: Target,
    strategy_name: str | None,
    split: str | None,
    batch_size: int | None,
    logical: Mapping[str, Any] | None = None,
) -> tuple[list[CompiledProgram], Load, Choice, str]:
    """Compiles the training step of a user's model for a target.

    Arguments in `logical` are for a strategy whose replicas have several
    devices.

    Returns the programs, the load of the model, the strategy with the
    target's devices, and a description.
    """
    backend = get_backend()
    if not isinstance(backend, CompilesForTargets):
        raise ValueError(
            "--target: only JAX has compilers for machines that are not here.\n"
            f"Received: the backend '{keras.backend.backend()}'. Expected: "
            "--backend jax. Or leave --target out: the arithmetic of `plan` "
            "holds for every backend."
        )
    if target.kind.platform == "cpu":
        # If JAX has started in this process, it has its devices.
        with contextlib.suppress(keras_dist.VirtualDevicesError):
            keras_dist.set_virtual_devices(target.sides[0] * target.sides[1])
    function = function_of(spec)
    with backend.on_target(target) as workers:
        choice = choice_on(target, workers, strategy_name, split)
        strategy = strategy_of(choice, target, logical)
        rows = batch_size or _ROWS * strategy.num_replicas_in_sync
        with without_values():
            model, batch = _model_of(spec, function, strategy, rows)
            with _explained(spec, target, batch):
                model._symbolic_build(data_batch=batch)
                programs = backend.compiled_step(
                    strategy.executor, model, batch
                )
            load = load_of(model, model.optimizer)
    count = model.count_params()
    what = f"{spec}, {count:,} parameters, {model.optimizer.name}"
    return programs, load, choice, f"{what}, {rows:,} rows a step"


def strategy_of(
    choice: Choice, target: Target, logical: Mapping[str, Any] | None = None
) -> Any:
    """Makes the chosen strategy on the devices of a target."""
    arguments = dict(logical or {})
    if arguments and choice.strategy not in ("mirrored", "multi-worker"):
        raise ValueError(
            "--logical-devices, --layout-map: replicas of several devices are "
            "for MirroredStrategy and MultiWorkerMirroredStrategy. Received: "
            f"--strategy {choice.strategy}, on {target}. Expected: --strategy "
            "mirrored for one host, or --strategy multi-worker."
        )
    if choice.strategy == "one-device":
        return keras_dist.OneDeviceStrategy(f"{target.kind.platform}:0")
    if choice.split is not None:
        arguments[_ARGUMENTS[choice.split]] = "sharded"
    if choice.strategy == "central":
        return keras_dist.CentralStorageStrategy()
    if choice.strategy == "mirrored":
        return keras_dist.MirroredStrategy(**arguments)
    tasks = [f"host{index}:1" for index in range(choice.workers or 1)]
    resolver = SimpleClusterResolver(
        ClusterSpec({"worker": tasks}), task_type="worker", task_id=0
    )
    return keras_dist.MultiWorkerMirroredStrategy(resolver, **arguments)


def _model_of(
    spec: str, function: Callable[[], Any], strategy: Any, rows: int
) -> tuple[keras.Model, tuple[Any, ...]]:
    """Makes the model under a strategy, and describes a batch for it."""
    with strategy.scope():
        given = _given(spec, function)
    model, *data = given if isinstance(given, tuple) and given else (given,)
    optimizer = getattr(model, "optimizer", None)
    if not isinstance(model, keras.Model) or optimizer is None:
        raise ValueError(
            f"--model {spec}: the function must return a compiled model, to "
            f"compile its step. Received: {kind_of(model)}. Expected: a "
            "`keras.Model`, after `model.compile` with an optimizer and a "
            "loss, alone or in a tuple (model, x, y)."
        )
    if len(data) > len(_PARTS):
        kinds = ", ".join(map(kind_of, given))
        raise ValueError(
            f"--model {spec}: the function returns the wrong number of values. "
            f"Received: a tuple of {kinds}. Expected: a model, or a tuple "
            "(model, x), (model, x, y) or (model, x, y, sample_weight)."
        )
    while data and data[-1] is None:
        data.pop()
    if data:
        named = zip(_PARTS, data, strict=False)
        return model, tuple(like_data(spec, n, rows, d) for n, d in named)
    x = _inputs_of(spec, model, rows)
    return model, (x, _labels_of(model, rows))


def _given(spec: str, function: Callable[[], Any]) -> Any:
    """Returns what the user's function returns."""
    try:
        return called(spec, function)
    except ValueError as error:
        if not isinstance(error.__cause__, keras_dist.StrategyMismatchError):
            raise
        raise ValueError(
            f"--model {spec}: the function makes a strategy. The command makes "
            "one for the target, and calls the function in its scope. "
            "Expected: a function that only makes and compiles a model."
        ) from error


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
    texts = [leaf for leaf in leaves if not is_numeric(str(leaf.dtype))]
    if texts:
        raise ValueError(
            f"--model {spec}: a step reads no arrays of text.\nReceived: the "
            "input "
            f"'{texts[0].name}' of dtype {texts[0].dtype}. Expected: inputs of "
            "numbers. Move the layers that read text to the data pipeline."
        )
    return keras.tree.map_structure(lambda i: rows_like(i, rows), inputs)


def _nest_of(model: keras.Model, name: str) -> Any:
    """Returns the tensors of a model's inputs or outputs, in their nest."""
    nest = getattr(model, name, None)  # a functional model's
    if nest is not None:
        return nest
    tensors = getattr(model, f"{name}s", None) or []
    return tensors[0] if len(tensors) == 1 else tensors


def _labels_of(model: keras.Model, rows: int) -> Any:
    """Describes labels: classes for a sparse loss, else as the outputs are."""
    outputs, losses = _nest_of(model, "output"), model.loss
    if losses is None:
        return None

    def described(output: Any, loss: Any) -> keras.KerasTensor:
        if _is_sparse(loss):
            return keras.KerasTensor((rows, *output.shape[1:-1]), "int32")
        return rows_like(output, rows)

    if isinstance(outputs, dict):
        by_name = losses if isinstance(losses, dict) else {}
        return {
            key: described(output, by_name.get(key, losses))
            for key, output in outputs.items()
        }
    if isinstance(outputs, (list, tuple)):
        several = losses
        if isinstance(losses, dict):
            several = [losses.get(name) for name in model.output_names]
        elif not isinstance(losses, (list, tuple)):
            several = [losses] * len(outputs)
        return [*map(described, outputs, several)]
    if isinstance(losses, (list, tuple, dict)) and len(losses) == 1:
        (losses,) = losses.values() if isinstance(losses, dict) else losses
    return described(outputs, losses)


def _is_sparse(loss: object) -> bool:
    """Tells whether a loss of Keras, or one with such a name, takes classes."""
    if isinstance(loss, keras.losses.Loss):
        loss = getattr(loss, "fn", type(loss))
    name = loss if isinstance(loss, str) else getattr(loss, "__name__", "")
    return "sparse" in name.lower()


@contextlib.contextmanager
def _explained(
    spec: str, target: Target, batch: tuple[Any, ...]
) -> Iterator[None]:
    """Names the model, the target and the batch in errors of the step."""
    try:
        yield
    except keras_dist.KerasDistError:
        raise
    except Exception as error:
        leaves = [
            leaf for leaf in keras.tree.flatten(batch) if leaf is not None
        ]
        shapes = [tuple(leaf.shape) for leaf in leaves]
        raise ValueError(
            f"--model {spec}: the training step can't be compiled for {target} "
            f"and a batch of shapes {shapes}. It failed with "
            f"{error_line(error)} If the shapes are wrong, return (model, x, "
            "y), with arrays of the right shapes. A step that reads a tensor's "
            "value, as `float(loss)` does, has none here."
        ) from error
