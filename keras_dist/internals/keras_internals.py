"""A door to Keras' private names in the front end.

`keras_data`, `keras_metrics`, `keras_optimizers` and `keras_random` have those
of a subject each, this module all others.

| name | why |
|---|---|
| `keras.src.backend.common.global_state` | replica threads inherit it |
| `keras.src.losses.loss` | reductions are over all replicas |
| `keras.src.backend.{get,set}_keras_mask` | masks travel with gathered rows |
| `keras.Model.__bases__[0]` | the class of trainers, layers have it too |
| `keras.Variable._value` | the value itself, whatever scope is open |
| `keras.Model._symbolic_build` | builds under the scope |
| `keras.Variable._layout` | where `keras.distribution` puts it, on JAX |
| `keras.Variable._path` | parts have the path of their variable |
| `keras.Layer._maybe_build` | replicas that call a layer first build it once |
| `keras.src.utils.backend_utils.in_tf_graph` | no data is read in a graph |
| `keras.src.backend.core.custom_gradient` | users' own backward passes |
| `keras.src.backend.core.stop_gradient` | in each step, without checks |
| `keras.Model._compile_config` | the arguments of `compile`, as objects |
| the global attribute `object_name_uids` | copies use up no names |
| `self` in the frame of `keras.Layer.__call__` | the layer that draws |
| `keras.Variable._aggregation` | declared from outside |
| `keras.src.saving.keras_saveable.KerasSaveable` | all that can be copied |
| `keras.src.models.cloning._clone_{sequential,functional}_model` | clones |
| `keras.src.saving.saving_lib._serialize_model_as_json` | a file's origin |
| `keras.src.saving.saving_lib._model_from_config` | reads the origin |
| `keras.src.saving.saving_lib.save_{model,weights_only}` | the chief writes |
| `keras.src.legacy.saving.legacy_h5_format.save_model_to_hdf5` | it too |

If one of them moves, `private` raises an error with its name.
"""

import collections
import contextlib
import inspect
import sys
from typing import Any

import keras

from keras_dist.core import context
from keras_dist.errors import UnsupportedKerasError
from keras_dist.internals import keras_random
from keras_dist.internals.private_names import private

global_state = private("keras.src.backend.common.global_state")
losses = private("keras.src.losses.loss")
cloning = private("keras.src.models.cloning")
saving_lib = private("keras.src.saving.saving_lib")
legacy_format = private("keras.src.legacy.saving.legacy_h5_format")
Saveable = private("keras.src.saving.keras_saveable.KerasSaveable")
in_tf_graph = private("keras.src.utils.backend_utils.in_tf_graph")
# The class that has `fit` and its relatives. It can be mixed into a layer.
Trainer: type[Any] = keras.Model.__bases__[0]
# Keras 3.16 has folders `ops` in its backends.
backend_core = private("keras.src.backend.ops.core", "keras.src.backend.core")
get_mask = private(
    "keras.src.backend.common.masking.get_keras_mask",
    "keras.src.backend.get_keras_mask",
)
set_mask = private(
    "keras.src.backend.common.masking.set_keras_mask",
    "keras.src.backend.set_keras_mask",
)

# Used later, as attributes.
for _name in ("custom_gradient", "stop_gradient"):
    private(
        f"keras.src.backend.ops.core.{_name}", f"keras.src.backend.core.{_name}"
    )
for _name in (
    "keras.src.backend.common.global_state.GLOBAL_STATE_TRACKER",
    "keras.src.losses.loss.reduce_weighted_values",
    "keras.src.losses.loss.scale_loss_for_distribution",
    "keras.src.losses.loss.unscale_loss_for_distribution",
    "keras.src.models.cloning._clone_functional_model",
    "keras.src.models.cloning._clone_sequential_model",
    "keras.src.saving.saving_lib._model_from_config",
    "keras.src.saving.saving_lib._serialize_model_as_json",
    "keras.src.saving.saving_lib.save_model",
    "keras.src.saving.saving_lib.save_weights_only",
    "keras.src.legacy.saving.legacy_h5_format.save_model_to_hdf5",
    "keras.Layer._clear_losses",
    "keras.Layer._maybe_build",
    "keras.Model._symbolic_build",
    "keras.Model.make_train_function",
    "keras.layers.BatchNormalization._moments",
):
    private(_name)


_NOT_INHERITED = {"stateless_scope", "current_call_ctx", "torch_device"}
_NAMES = "name_scope_stack"
_NAME_COUNTS = "object_name_uids"
_COMPILATION = "keras_dist_compilation"
_LAYER_CALL = inspect.unwrap(keras.Layer.__call__).__code__


def refuse_nnx_mode() -> None:
    """Refuses a mode of Keras that keras_dist does not support."""
    if keras.config.is_nnx_enabled():
        raise UnsupportedKerasError(
            "keras_dist does not support Keras' NNX mode, which keeps "
            "variables in Flax objects. Received: NNX enabled. Unset "
            "KERAS_NNX_ENABLED, or `nnx_enabled` in keras.json."
        )


def is_wholly_built(model: keras.Model) -> bool:
    """Returns whether a model, its loss, metrics and optimizer are built."""
    names = ("_compile_metrics", "_compile_loss", "optimizer")
    parts = [getattr(model, name, None) for name in names]
    parts += model._flatten_layers()
    return all(part is None or part.built for part in parts)


def name_counts() -> dict[str, int]:
    """Returns the number of objects that Keras has numbered for each name."""
    return dict(global_state.get_global_attribute(_NAME_COUNTS) or {})


def set_name_counts(counts: dict[str, int]) -> None:
    """Restores the numbers from `name_counts`."""
    numbers = collections.defaultdict(int, counts)
    global_state.set_global_attribute(_NAME_COUNTS, numbers)


def compile_arguments(model: keras.Model) -> dict[str, Any] | None:
    """Returns the arguments of a model's `compile`, `None` without any, and
    for one of its own."""
    if not model.compiled or type(model).compile is not keras.Model.compile:
        return None
    return dict(model._compile_config.config)


def innermost_layer() -> keras.Layer | None:
    """Returns the innermost layer that this thread calls, or `None`."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not _LAYER_CALL:
        frame = frame.f_back  # type: ignore[assignment]
    layer: keras.Layer | None = frame and frame.f_locals["self"]
    return layer


def place_in_call() -> str:
    """Returns where this thread is: the innermost layer, and lines in it.

    Without a layer, these are lines of the code that keras_dist has called.
    """
    lines: list[int] = []
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not _LAYER_CALL:
        if frame.f_globals.get("__name__", "").startswith("keras_dist"):
            if lines:
                break
        else:
            lines.append(frame.f_lineno)
        frame = frame.f_back  # type: ignore[assignment]
    is_layer = frame is not None and frame.f_code is _LAYER_CALL
    name = f"layer '{frame.f_locals['self'].name}'" if is_layer else "a step"
    return f"{name}|{lines}"


# The modules that load a file of Keras'.
LOADING = (saving_lib, private("keras.src.optimizers.base_optimizer"))
# The functions that save a model, their first argument, and their owners.
SAVING = (
    (saving_lib, "save_model"),
    (saving_lib, "save_weights_only"),
    (legacy_format, "save_model_to_hdf5"),
    (keras.Model, "export"),
)


def losses_with_own_call() -> list[Any]:
    """Returns the classes of Keras' losses with a `__call__`, `Loss` first.

    From Keras 3.16, there are others that don't call that of `Loss`.
    """
    loss = keras.losses.Loss
    members = (
        member for member in vars(keras.losses).values() if member is not loss
    )
    return [
        loss,
        *(
            member
            for member in members
            if inspect.isclass(member)
            and issubclass(member, loss)
            and "__call__" in vars(member)
        ),
    ]


def modules_that_reduce_losses() -> list[Any]:
    """Returns the modules in which losses find `reduce_weighted_values`."""
    name = "reduce_weighted_values"
    original = vars(losses)[name]
    return [
        module
        for path, module in list(sys.modules.items())
        if path.startswith("keras.") and vars(module).get(name) is original
    ]


def build_from(model: keras.Model, batch: object) -> None:
    """Builds what a compiled model's first step would, from a batch."""
    model._symbolic_build(data_batch=batch)


def thread_state() -> dict[str, Any]:
    """Returns the state that a replica's thread inherits from its caller's.

    Returns:
        Dict of Keras' global attributes and what keras_dist adds to them, for
        `inherit_thread_state`.
    """
    keras_random.lend_global_seed()
    state = {
        name: value
        for name, value in vars(global_state.GLOBAL_STATE_TRACKER).items()
        if name not in _NOT_INHERITED
    }
    # Each thread gets a list of its own, which begins with the same names.
    state[_NAMES] = tuple(global_state.get_global_attribute(_NAMES) or ())
    state[_COMPILATION] = context.tracing_state()
    return state


def inherit_thread_state(state: dict[str, Any]) -> None:
    """Gives this thread the state of another one, from `thread_state`.

    Args:
        state: Dict that `thread_state` returned in the other thread.
    """
    for name, value in state.items():
        if name == _COMPILATION:
            context.inherit_tracing(value)
            continue
        copied = list(value) if name == _NAMES else value
        global_state.set_global_attribute(name, copied)


def session() -> object:
    """Returns an object that `keras.utils.clear_session` replaces."""
    return global_state.GLOBAL_STATE_TRACKER


def value_of(variable: keras.Variable) -> Any:
    """Returns the framework's value of a variable, whatever scope is open."""
    return variable._value


def layout_of(variable: keras.Variable) -> Any:
    """Returns a variable's layout from `keras.distribution`, or `None`."""
    return getattr(variable, "_layout", None)


def has_value(variable: keras.Variable) -> bool:
    """Returns whether a variable has been given a value yet."""
    return vars(variable).get("_value") is not None


def stateless_scope() -> keras.StatelessScope | None:
    """Returns the stateless scope that is open in this thread, or `None`."""
    # Without Keras' own function, as each step asks often.
    tracker = global_state.GLOBAL_STATE_TRACKER
    return getattr(tracker, "stateless_scope", None)


def in_symbolic_scope() -> bool:
    """Returns whether Keras only looks for the shapes of outputs."""
    return global_state.get_global_attribute("symbolic_scope") is not None


def set_stateless_scope(
    scope: keras.StatelessScope | None,
) -> keras.StatelessScope | None:
    """Makes a stateless scope current, and returns the one before."""
    tracker = global_state.GLOBAL_STATE_TRACKER
    before = getattr(tracker, "stateless_scope", None)
    tracker.stateless_scope = scope
    return before


class opened(contextlib.AbstractContextManager[None]):
    """Makes a stateless scope, or none, this thread's inside the context."""

    def __init__(self, scope: keras.StatelessScope | None) -> None:
        self._scope = scope

    def __enter__(self) -> None:
        tracker = global_state.GLOBAL_STATE_TRACKER
        self._before = getattr(tracker, "stateless_scope", None)
        tracker.stateless_scope = self._scope

    def __exit__(self, *error: object) -> None:
        global_state.GLOBAL_STATE_TRACKER.stateless_scope = self._before


def set_uninitialized(variables: list[keras.Variable]) -> list[keras.Variable]:
    """Replaces the variables that Keras initializes at the end of a scope."""
    name = "uninitialized_variables"
    before: list[keras.Variable] = global_state.get_global_attribute(name, [])
    global_state.set_global_attribute(name, variables)
    return before


def is_of_keras(definition: object) -> bool:
    """Returns whether a class or function is Keras' own, on any backend."""
    module = getattr(definition, "__module__", None) or ""
    return bool(module.split(".")[0] == "keras")


def name_like(variable: keras.Variable, other: keras.Variable) -> None:
    """Gives a variable the path of another one."""
    variable._path = other.path


def set_aggregation(variable: keras.Variable, aggregation: str) -> None:
    """Changes what a variable was declared with."""
    variable._aggregation = aggregation


def set_value(variable: keras.Variable, value: object) -> None:
    """Replaces the framework's value of a variable; `None` frees it."""
    variable._value = value
