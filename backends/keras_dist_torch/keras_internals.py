"""The door to Keras' private names; `TorchModuleWrapper` is refused.

FSDP gathers the parameters of modules: `_torch_params`, where Keras has those
of a layer, `_track_variables`, which fills it, `_layers`, which has the layers
that PyTorch does not see, and `_functional`, the other model of a Sequential.
What an optimizer computes from parts is written by `_direct_assign`.

`TorchEpochIterator` reads the batches of `fit`. Those of arrays are rows of an
`ArrayDataAdapter`'s `_inputs`, in the order of its `_shuffle`.

`CustomGradientFunction` calls functions with gradients of their own.

A model is asked by one of `ASKS_TO_COMPILE` whether Keras compiles its steps.

An optimizer's `_learning_rate` may be a schedule, of which
`_get_current_learning_rate` gives the current rate.

`_initialize_with_initializer` makes the value of a variable, and
`TorchParallelOptimizer` updates many variables by one call. A `SeedGenerator`
without a seed, which has no `_initial_seed`, means PyTorch's own generator;
others give a `torch_seed_generator`.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import keras
import torch

from keras_dist.plugins import global_state
from keras_dist.plugins import private

TorchModuleWrapper = private("keras.src.utils.torch_utils.TorchModuleWrapper")
ParallelOptimizer = private(
    "keras.src.backend.torch.optimizers.torch_parallel_optimizer"
    ".TorchParallelOptimizer"
)
CustomGradient = private(
    "keras.src.backend.torch.core.CustomGradientFunction",
    "keras.src.backend.torch.ops.core.CustomGradientFunction",  # Keras 3.16
)
private("keras.Variable._initialize_with_initializer")
# The latter from Keras 3.16.
ASKS_TO_COMPILE = ("_should_torch_compile", "_use_torch_compile")
private(*[f"keras.Model.{name}" for name in ASKS_TO_COMPILE])
_generator_of = private("keras.src.backend.torch.random.torch_seed_generator")
_ArrayAdapter = private(
    "keras.src.trainers.data_adapters.array_data_adapter.ArrayDataAdapter"
)
EpochIterator = private("keras.src.backend.torch.trainer.TorchEpochIterator")


def has_no_seed(generator: Any) -> bool:
    """Returns whether a `SeedGenerator` was made without a seed."""
    is_generator = isinstance(generator, keras.random.SeedGenerator)
    return is_generator and generator._initial_seed is None


def mask_of_dropout(
    sizes: list[int], rate: float, seed: object
) -> torch.Tensor:
    """Returns the mask that `keras.random.dropout` makes of a seed."""
    generator = _generator_of(seed)
    kept = torch.full(sizes, 1.0 - rate, device=generator.device)
    return torch.bernoulli(kept, generator=generator).bool()


def parameter_of(variable: keras.Variable) -> torch.Tensor | None:
    """Returns a variable's tensor, in any scope, or `None` before it."""
    return variable._value


def tensor_of(variable: keras.Variable) -> torch.Tensor:
    value = parameter_of(variable)
    assert value is not None
    return value


def own_variables(layer: keras.Layer) -> list[keras.Variable]:
    """Returns a layer's variables without those of layers in it."""
    return [*layer._trainable_variables, *layer._non_trainable_variables]


def dtype_in_use(layer: keras.Layer, variable: keras.Variable) -> str:
    """Returns the dtype in which a layer reads its variable."""
    used: str = layer.compute_dtype
    is_cast = variable._autocast and layer.autocast
    return (
        used
        if is_cast and keras.backend.is_float_dtype(used)
        else (variable.dtype)
    )


def own_layers(layer: keras.Layer) -> list[keras.Layer]:
    """Returns the layers in a layer, without those in them."""
    return list(layer._layers)


def hidden_models(layer: keras.Layer) -> list[keras.Model]:
    """Returns the models of a layer that Keras does not list as its layers."""
    inner = getattr(layer, "_functional", None)
    return [] if inner is None else [inner]


def parameters_of(layer: keras.Layer) -> torch.nn.Module | None:
    """Returns the module with a layer's parameters, once it is built."""
    module: torch.nn.Module | None = layer._modules.get("_torch_params")
    return module


def set_parameters(layer: keras.Layer, module: torch.nn.Module) -> None:
    """Replaces the module with a layer's parameters."""
    layer._modules["_torch_params"] = module


def arrays_in(iterator: Any) -> tuple[list[Any], int | None]:
    """Returns the arrays that batches are taken from, if they are, and how
    many numbers a batch has that may be read ahead.

    That is `None` for users' own iterators, and for what draws random numbers
    for each batch: nothing of them may be read before it is needed.
    """
    adapter = iterator.data_adapter
    is_array = isinstance(adapter, _ArrayAdapter)
    arrays = keras.tree.flatten(adapter._inputs if is_array else None)
    if not is_array or adapter._shuffle == "batch":
        return arrays, None
    return arrays, _size_of_row(arrays) * adapter._batch_size


def _size_of_row(arrays: list[Any]) -> int:
    # An axis of unknown size, such as a ragged one, counts as one number.
    shapes = [array.shape[1:] for array in arrays if array is not None]
    return sum(math.prod(size or 1 for size in shape) for shape in shapes)


def learning_rate_known(
    optimizer: keras.Optimizer,
) -> contextlib.AbstractContextManager[None]:
    """Makes a schedule of learning rates the rate of this step, inside.

    A schedule may be Python code that no graph can have.
    """
    schedule = vars(optimizer)["_learning_rate"]
    if isinstance(schedule, keras.Variable):
        return contextlib.nullcontext()
    return _rate_instead(
        vars(optimizer), optimizer._get_current_learning_rate()
    )


@contextlib.contextmanager
def _rate_instead(attributes: dict[str, Any], rate: Any) -> Iterator[None]:
    schedule = attributes["_learning_rate"]
    attributes["_learning_rate"] = keras.ops.convert_to_tensor(rate)
    try:
        yield
    finally:
        attributes["_learning_rate"] = schedule


def forget_parameter(variable: keras.Variable) -> None:
    del vars(variable)["_value"]


def device_scope() -> str | None:
    """Returns the device of the open `keras.device`, `None` without one."""
    device: str | None = global_state.get_global_attribute("torch_device")
    return device


def on_device(
    device: torch.device,
) -> contextlib.AbstractContextManager[Any]:
    """Makes Keras put tensors on a device, with nothing to do if it does."""
    name = str(device)
    if device_scope() == name:
        return contextlib.nullcontext()
    scope: contextlib.AbstractContextManager[Any] = keras.device(name)
    return scope
