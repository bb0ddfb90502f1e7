"""The one door to Keras' private names in this package.

| name | why |
|---|---|
| `keras.Variable._value` | the array itself, whatever scope is open |
| `keras.Variable._dtype` | the array's; `dtype` is what layers cast it to |
| `keras.Variable._initializer` | called for a value while `_value` is away |
| `keras.Variable._initialize_with_initializer` | replaced: variables that |
| | start in parts |
| `Model._get_jax_state` | replaced: by it `fit` takes the variables' values |
| `Model.{jax_,}state_sync` | replaced: by it `fit` hands them back |
| `Model._jax_state` | the state after the last step, emptied on failure |
| `Model._jax_state_synced` | tells `fit` to take the values again |
| `Model._make_function` | Keras' loop over `steps_per_execution` |
| `EpochIterator._get_iterator` | replaced: it would send whole batches ahead |
| `Model._losses_override` | keeps tracers of a trace that failed |
| `keras.src.backend.jax.core.cond` | branches that assign variables |
| `keras.src.backend.jax.nn._can_use_flash_attention` | a kernel for TPUs that |
| | XLA can't divide over devices |
| `keras.src.random.seed_generator.global_seed_generator` | refused in traces |
| `keras.src.random.seed_generator.draw_seed` | an initializer's numbers |
| the attribute `global_seed_generator` of Keras' global state | its generator |
| `LossScaleOptimizer._common_apply` | replaced: its branches assign |
| `Layer._flatten_layers` | the layers of all models inside of one |
| `Optimizer._trainable_variables` | those that it was built for |
| `Optimizer._get_current_learning_rate` | replaced by a traced rate |
"""

import contextlib
import functools
import inspect
import threading
import types
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import keras

from keras_dist.errors import UnsupportedModelError
from keras_dist.plugins import JOINS_STEPS
from keras_dist.plugins import all_optimizers
from keras_dist.plugins import as_hook
from keras_dist.plugins import global_state
from keras_dist.plugins import inner_of
from keras_dist.plugins import private
from keras_dist.plugins import trainable_variables
from keras_dist.plugins import unique

core = private("keras.src.backend.jax.ops.core", "keras.src.backend.jax.core")
nn = private("keras.src.backend.jax.ops.nn", "keras.src.backend.jax.nn")
seed_generator = private("keras.src.random.seed_generator")

for _name in (
    "keras.Layer._flatten_layers",
    "keras.Model._get_jax_state",
    "keras.Model._make_function",
    "keras.Variable._initialize_with_initializer",
    "keras.optimizers.LossScaleOptimizer._common_apply",
    "keras.optimizers.Optimizer._get_current_learning_rate",
):
    private(_name)
private(
    "keras.src.backend.jax.ops.nn._can_use_flash_attention",
    "keras.src.backend.jax.nn._can_use_flash_attention",
)
private("keras.Model.state_sync", "keras.Model.jax_state_sync")
# The methods by which `fit` hands back what a step changed. Keras 3.16 has two.
SYNCS = tuple(
    name
    for name in ("state_sync", "jax_state_sync")
    if hasattr(keras.Model, name)
)

# The order in which `fit` passes the groups of the state to a step.
STATE_GROUPS = (
    "trainable_variables",
    "non_trainable_variables",
    "optimizer_variables",
    "metrics_variables",
)


def array_of(variable: keras.Variable) -> Any:
    """Returns the `jax.Array` that a variable keeps, or `None` without one."""
    return variable._value


def dtype_of(variable: keras.Variable) -> str:
    """Returns the dtype of a variable's array, whatever layers cast it to."""
    dtype: str = keras.backend.standardize_dtype(variable._dtype)
    return dtype


def set_array(variable: keras.Variable, array: object) -> None:
    """Gives a variable its `jax.Array`, without Keras' conversions."""
    variable._value = array


def take_away(variable: keras.Variable, on_read: Callable[..., Any]) -> None:
    """Empties a variable; reading it then calls `on_read(shape, dtype=...)`."""
    variable._value = None
    variable._initializer = on_read


def give_back(variable: keras.Variable, array: object) -> None:
    """Undoes `take_away`, with a new value."""
    variable._value = array
    variable._initializer = None


def variables_of(model: keras.Model, group: str) -> list[keras.Variable]:
    """Returns one group of a model's state, in the order of its trainer."""
    if group != "optimizer_variables":
        return list(getattr(model, group))
    return unique(
        v for optimizer in optimizers_of(model) for v in optimizer.variables
    )


def optimizers_of(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """Returns the optimizers whose variables are part of a model's state."""
    if takes_data_only(model.train_step):
        return list(all_optimizers(model).values())
    return [model.optimizer]


def trained_by(
    optimizer: keras.optimizers.Optimizer, variables: Any = None
) -> list[keras.Variable]:
    """Returns the variables that `optimizer.apply(_, variables)` updates."""
    return trainable_variables(optimizer) if variables is None else [*variables]


@contextlib.contextmanager
def replaced(instance: object, **hooks: Any) -> Iterator[None]:
    """Replaces attributes of one object, past Keras' tracking, while open."""
    attributes = vars(instance)
    before = {name: attributes[name] for name in hooks if name in attributes}
    attributes.update(hooks)
    try:
        yield
    finally:
        for name in hooks:
            del attributes[name]
        attributes.update(before)


def at_rate(
    optimizer: keras.Optimizer, rate: object
) -> contextlib.AbstractContextManager[None]:
    """Makes an optimizer use a learning rate, unless it is `None`."""
    if rate is None:
        return contextlib.nullcontext()
    return replaced(
        inner_of(optimizer), _get_current_learning_rate=lambda: rate
    )


def compiles(model: keras.Model) -> bool:
    """Tells whether a model's steps are compiled."""
    return bool(not model.run_eagerly and model.jit_compile)


def layers_without_jit(model: keras.Model) -> list[keras.Layer]:
    """Returns the layers for which Keras does not compile a model."""
    layers = model._flatten_layers()
    return [layer for layer in layers if not layer.supports_jit]


def read_on_host(iterator: Any) -> None:
    """Makes a trainer's iterator give batches as its adapter does.

    Keras would send whole batches ahead, and steps send the rows they need.
    """
    iterator._get_iterator = iterator.data_adapter.get_jax_iterator


def takes_data_only(step: Callable[..., Any]) -> bool:
    """Tells whether a step is written with variables: it takes no `state`."""
    parameters = inspect.signature(step).parameters.values()
    required = [
        parameter
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind
        in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    return len(required) == 1


def draw_seed(seed: object) -> Any:
    """Returns the numbers that Keras draws by an initializer's seed."""
    return seed_generator.draw_seed(seed)


def mark_synced(model: keras.Model) -> None:
    """Makes `fit` take the variables' values again before the next step."""
    model._jax_state_synced = True


def forget_failure(model: keras.Model) -> None:
    """Resets the attributes of a model that a failed step left behind."""
    model._jax_state = None
    model._jax_state_synced = True
    model._losses_override = []


def forget_functions(model: keras.Model) -> None:
    """Drops the functions that the model compiled before it was distributed."""
    model.train_function = None
    model.test_function = None
    model.predict_function = None


def loop_of(
    model: keras.Model, step: Callable[..., Any], concatenate: bool = False
) -> Callable[..., Any]:
    """Makes Keras' function that runs `steps_per_execution` steps."""
    make = type(model)._make_function
    maker: Any = model
    if JOINS_STEPS:
        # It would compile the step, which is compiled already.
        maker = types.SimpleNamespace(
            run_eagerly=True,
            jit_compile=False,
            steps_per_execution=model.steps_per_execution,
        )
    loop: Callable[..., Any] = make(
        maker, step, concatenate_outputs=concatenate
    )
    return loop


def original(model: keras.Model, name: str) -> Callable[..., Any]:
    """Returns a method of the model's class, bound to the model."""
    method: Callable[..., Any] = getattr(type(model), name).__get__(model)
    return method


class _Attention(threading.local):
    is_divided = False


_attention = _Attention()


@as_hook
def hook_attention(
    original: Callable[..., Any],
    *args: Any,
    raise_error: bool = False,
    **kwargs: Any,
) -> Any:
    """Stands for what tells whether flash attention can be used."""
    if not _attention.is_divided:
        return original(*args, raise_error=raise_error, **kwargs)
    if raise_error:
        raise UnsupportedModelError(
            "Keras' flash attention for TPUs is one kernel, which can't be "
            "divided over the replicas of `fit`. Received: "
            "flash_attention=True. Expected: None, for plain attention on "
            "several TPUs, or a loop of your own with "
            "`keras_dist.function`, where each replica runs the kernel."
        )
    return False


def with_divided_attention(step: Callable[..., Any]) -> Callable[..., Any]:
    """Keeps a step that all TPUs run together from kernels of one TPU."""

    @functools.wraps(step)
    def divided(*args: Any, **kwargs: Any) -> Any:
        before, _attention.is_divided = _attention.is_divided, True
        try:
            return step(*args, **kwargs)
        finally:
            _attention.is_divided = before

    return divided


def global_seed() -> Any:
    """Returns Keras' own `SeedGenerator`, or `None` before it is made."""
    return global_state.get_global_attribute("global_seed_generator")
