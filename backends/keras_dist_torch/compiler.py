"""Compiled functions on PyTorch: `torch.compile`, only if asked for."""

import contextlib
import weakref
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import keras
import torch
from keras import ops

from keras_dist.plugins import HOOKS
from keras_dist.plugins import CallOfReplica
from keras_dist.plugins import CompiledFunction
from keras_dist.plugins import Compiler
from keras_dist.plugins import Mirrored
from keras_dist.plugins import PerReplica
from keras_dist.plugins import RunsReplicas
from keras_dist.plugins import check_arguments
from keras_dist.plugins import check_cross_replica
from keras_dist.plugins import inlining
from keras_dist.plugins import map_nest
from keras_dist.plugins import refusing_variables
from keras_dist.plugins import run_uncompiled
from keras_dist_torch.torch_internals import pytree


class TorchCompiler(Compiler):
    """Calls functions eagerly, or with `jit_compile` by `torch.compile`."""

    def __init__(self) -> None:
        self._have_run: weakref.WeakSet[Any] = weakref.WeakSet()
        self._compiled: weakref.WeakKeyDictionary[Any, Callable[..., Any]] = (
            weakref.WeakKeyDictionary()
        )

    def call(
        self,
        function: CompiledFunction,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        check_arguments(function, args, kwargs)
        args, kwargs = map_nest(_traced, (tuple(args), kwargs))
        with self._running(function):
            result = self._callable(function)(*args, **kwargs)
            return map_nest(value_now, result)

    def call_in_replica(
        self,
        function: CompiledFunction,
        call: CallOfReplica,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        # A call within a replica function, and gradients flow through it.
        return self.call(function, args, kwargs)

    def run(
        self,
        strategy: RunsReplicas,
        fn: "CompiledFunction | Callable[..., Any]",
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
    ) -> Any:
        assert isinstance(fn, CompiledFunction)  # nothing else without traces
        check_cross_replica(strategy, "run")
        check_arguments(fn, args, kwargs or {})
        args, kwargs = map_nest(_traced, (args, kwargs))
        with self._running(fn):
            return run_uncompiled(strategy, self._callable(fn), args, kwargs)

    def _callable(self, function: CompiledFunction) -> Callable[..., Any]:
        if not function.jit_compile:
            return function.python_function
        if function.key not in self._compiled:
            self._compiled[function.key] = torch.compile(function.held_weakly())
        return self._compiled[function.key]

    @contextlib.contextmanager
    def _running(self, function: CompiledFunction) -> Any:
        refusing = (
            refusing_variables(function.name)
            if function.key in self._have_run
            else contextlib.nullcontext()
        )
        with inlining(), HOOKS, refusing:
            yield
        self._have_run.add(function.key)


def _traced(leaf: object) -> Any:
    """Converts an array to a tensor, as other backends do for functions."""
    if isinstance(leaf, (PerReplica, Mirrored)):
        return type(leaf)([map_nest(_traced, value) for value in leaf.values])
    if isinstance(leaf, (torch.Tensor, keras.Variable)):
        return leaf
    # A NumPy array, or another framework's tensor, such as from `tf.data`.
    if hasattr(leaf, "__array__") and hasattr(leaf, "shape"):
        return ops.convert_to_tensor(leaf)
    return leaf


def snapshot(value: object) -> Any:
    """Copies a tensor that may share memory with a variable."""
    if not isinstance(value, torch.Tensor):
        return value
    # A result with a graph of autograd that is no view has its own memory. Any
    # other tensor may be a variable's, or a part of it: `detach` hides that.
    if value.grad_fn is not None and value._base is None:
        return value
    return value.clone()


def value_now(leaf: object) -> Any:
    """Converts a result of a compiled function; variables become tensors."""
    return snapshot(leaf.value if isinstance(leaf, keras.Variable) else leaf)


def register_trees() -> None:
    """Registers per-replica values as nests with PyTorch's pytrees."""
    for kind in (PerReplica, Mirrored):
        pytree.register_pytree_node(
            kind,
            lambda value: (list(value.values), None),
            lambda values, _, kind=kind: kind(values),
            serialized_type_name=f"keras_dist.{kind.__name__}",
        )
