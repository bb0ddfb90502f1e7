"""Layers whose variables FSDP gathers together, when the layer is called.

Large variables are parameters of a `ShardedParameters` module of their layer. A
unit is a layer, with layers in it that are no units: it has `LEAST_BYTES` in
shards, or it is a layer of a model, or it computes in another dtype than its
unit would.
FSDP gathers the values in the dtype that layers compute in. Variables that are
read elsewhere are gathered there.
"""

from collections import Counter
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import keras
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard

from keras_dist.plugins import num_bytes
from keras_dist_torch.flat import axis_of
from keras_dist_torch.fsdp_internals import Dtypes
from keras_dist_torch.fsdp_internals import forget_order
from keras_dist_torch.fsdp_internals import make_root
from keras_dist_torch.fsdp_internals import shard_module
from keras_dist_torch.fsdp_internals import state_of
from keras_dist_torch.keras_internals import dtype_in_use
from keras_dist_torch.keras_internals import hidden_models
from keras_dist_torch.keras_internals import own_layers
from keras_dist_torch.keras_internals import own_variables
from keras_dist_torch.keras_internals import parameters_of
from keras_dist_torch.keras_internals import set_parameters
from keras_dist_torch.record import TorchRecord
from keras_dist_torch.shards import is_sharded

# Bytes of a layer inside of another layer that are worth a gather.
LEAST_BYTES = 1 << 22
# Of a model whose variables are in units of it.
_NO_DTYPES = torch.float32, torch.float32


class ShardedParameters(torch.nn.Module):
    """A layer's sharded variables; setting a parameter sets its variable's.

    It stands for the dictionary in which Keras has a layer's parameters.
    """

    def __init__(self, variables: list[keras.Variable]) -> None:
        super().__init__()
        named = {f"v{i}": variable for i, variable in enumerate(variables)}
        self.__dict__["variables_by_name"] = named

    def __setattr__(self, name: str, value: object) -> None:
        variable = self.__dict__.get("variables_by_name", {}).get(name)
        if variable is None:
            super().__setattr__(name, value)
            return
        self._parameters[name] = value
        record = TorchRecord.of(variable)
        record.tensor = value
        if isinstance(value, DTensor):
            record.parts = value

    def __contains__(self, path: str) -> bool:
        return True  # so that Keras adds nothing

    def pop(self, path: str) -> None:
        """Does nothing: Keras stops tracking a variable."""

    def make_whole(self) -> None:
        """Makes parameters of the whole values, for FSDP to shard."""
        for name, variable in self.variables_by_name.items():
            whole = TorchRecord.of(variable).parts.detach().full_tensor()
            parameter = torch.nn.Parameter(whole, variable.trainable)
            self.register_parameter(name, parameter)


SumOfRows = Callable[[torch.Tensor], torch.Tensor] | None


def shard_layers(
    model: keras.Model, mesh: DeviceMesh, sum_of_rows: SumOfRows
) -> None:
    """Shards the layers of a built model that are not yet, and the model.

    Gradients are summed by a function of a (workers, any) tensor that returns
    this worker's row of the sum, or by FSDP itself.
    """
    layers = new_layers(model)
    for layer in layers:
        _show_layers(layer)
        set_parameters(layer, ShardedParameters(_in_parts(layer)))
        for inner in hidden_models(layer):
            set_parameters(inner, ShardedParameters([]))
    for unit, dtypes in _Units(layers).units:
        _shard(unit, dtypes, mesh, sum_of_rows)
    if state_of(model) is None:
        _shard(model, _NO_DTYPES, mesh, sum_of_rows)
    make_root(model)


def new_layers(model: keras.Model) -> list[keras.Layer]:
    """Returns the built layers of a model that FSDP does not know yet."""
    return [layer for layer in model._flatten_layers() if _is_new(layer)]


def is_live(layer: keras.Layer) -> bool:
    return isinstance(parameters_of(layer), ShardedParameters)


def _is_new(layer: keras.Layer) -> bool:
    return layer.built and not is_live(layer)


def _in_parts(layer: keras.Layer) -> list[keras.Variable]:
    return [*filter(is_sharded, own_variables(layer))]


def _show_layers(layer: keras.Layer) -> None:
    """Makes layers that Keras has in lists modules of their layer."""
    modules = vars(layer)["_modules"]
    known = {id(module) for module in modules.values()}
    for index, sublayer in enumerate(own_layers(layer)):
        if id(sublayer) not in known:
            # When a model is saved, Keras visits other names.
            modules[f"__keras_dist_{index}"] = sublayer


class _Units:
    """Chooses units among layers; inner ones come first."""

    def __init__(self, layers: list[keras.Layer]) -> None:
        # Units, and the dtypes of their variables.
        self.units: list[tuple[keras.Layer, Dtypes]] = []
        self._left = {id(layer) for layer in layers}
        for layer in layers:
            self._add(layer, self._visit(layer))

    def _visit(self, layer: keras.Layer) -> list[keras.Layer]:
        """Returns those of a layer and the layers in it that no unit has."""
        if id(layer) not in self._left:
            return []
        self._left.discard(id(layer))
        rest = [layer] if _in_parts(layer) else []
        is_model = isinstance(layer, keras.Model)
        for sublayer in own_layers(layer):
            of_it = self._visit(sublayer)
            if is_model:
                self._add(sublayer, of_it)
            else:
                rest += of_it
        # The cell of a recurrent layer is called once for each time step.
        is_cell = hasattr(layer, "state_size") and not hasattr(layer, "cell")
        is_large = sum(map(_num_bytes, rest)) >= LEAST_BYTES and not is_cell
        if is_model or is_large:
            self._add(layer, rest)
            return []
        return rest

    def _add(self, unit: keras.Layer, layers: list[keras.Layer]) -> None:
        """Makes units of a layer and of those in it with other dtypes."""
        if not layers:
            return
        sizes: Counter[Dtypes] = Counter()
        for layer in layers:
            sizes[_dtypes(layer)] += _num_bytes(layer)
        most = max(sizes, key=lambda dtypes: sizes[dtypes])
        if unit in layers:
            most = _dtypes(unit)
        of_each = [(layer, _dtypes(layer)) for layer in layers]
        self.units += [pair for pair in of_each if pair[1] != most]
        self.units.append((unit, most))


def _num_bytes(layer: keras.Layer) -> int:
    return sum(map(num_bytes, _in_parts(layer)))


def _dtypes(layer: keras.Layer) -> Dtypes:
    """Returns the dtype of a layer's variables, and the dtype it computes in.

    If it reads some in other dtypes than the rest, both are the variables'."""
    variables = _in_parts(layer)
    kept, *_ = {variable.dtype for variable in variables}
    used = {dtype_in_use(layer, variable) for variable in variables}
    chosen = used.pop() if len(used) == 1 else kept
    return getattr(torch, kept), getattr(torch, chosen)


def _shard(
    module: Any, dtypes: Dtypes, mesh: DeviceMesh, sum_of_rows: SumOfRows
) -> None:
    for live in _lives(module):
        live.make_whole()

    def shard_of(parameter: torch.nn.Parameter) -> Shard:
        return Shard(axis_of(parameter.shape, mesh.size()))

    module.register_forward_hook(_own_results)
    shard_module(
        module, dtypes, sum_of_rows, mesh=mesh, shard_placement_fn=shard_of
    )
    if isinstance(module, keras.Model):
        module.register_forward_hook(forget_order)


def _lives(module: torch.nn.Module) -> Iterator[ShardedParameters]:
    """Yields the variables of a module that no unit in it has."""
    if isinstance(module, ShardedParameters):
        yield module
    for child in module._modules.values():
        if child is not None and state_of(child) is None:
            yield from _lives(child)


def _own_results(module: object, inputs: object, outputs: object) -> Any:
    """Copies results that are views of others.

    A change of a view in place would drop FSDP's hook on its gradient.
    """

    def copied(leaf: Any) -> Any:
        is_view = isinstance(leaf, torch.Tensor) and leaf._base is not None
        if not (is_view and leaf.requires_grad):
            return leaf
        return keras.ops.copy(leaf)

    return keras.tree.map_structure(copied, outputs)
