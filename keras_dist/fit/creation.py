"""Hooks on the creation of models and variables under a strategy.

They are there for all threads while any scope is open, and look up the strategy
of the calling thread.
"""

import contextlib
import functools
import threading
from collections.abc import Callable
from collections.abc import Iterator
from functools import partial
from typing import Any

import keras

from keras_dist.core import context
from keras_dist.core.context import replaced
from keras_dist.errors import ReplicaDivergenceError
from keras_dist.errors import StrategyMismatchError
from keras_dist.fit import hooks
from keras_dist.fit import updates
from keras_dist.fit.binding import bind_model
from keras_dist.fit.binding import claim_variable
from keras_dist.fit.plain_models import notice
from keras_dist.fit.plain_models import notice_scope
from keras_dist.internals.keras_internals import Trainer
from keras_dist.internals.keras_internals import all_variables
from keras_dist.plugin.front_end import KerasHooks
from keras_dist.plugin.front_end import bound
from keras_dist.replica.on_read import SyncOnReadVariable
from keras_dist.replica.scopes import base_scope
from keras_dist.replica.scopes import suspended
from keras_dist.replica.state import current_call

_lock = threading.Lock()
_open_scopes = 0
_undo = contextlib.ExitStack()


class _Current(threading.local):
    makes_metric_state = False
    # The variable for which an optimizer is making a slot.
    reference: Any = None


_current = _Current()


@contextlib.contextmanager
def creation_hooks() -> Iterator[None]:
    """Installs the hooks with the first scope; removes them with the last."""
    global _open_scopes
    _share_new_variables()
    hooks.install_normalization()
    updates.install()
    with _lock:
        if _open_scopes == 0:
            for cls, method, hook in (
                (keras.Model, "__init__", partial(_hook_init, True)),
                (Trainer, "__init__", partial(_hook_init, False)),
                (keras.Variable, "__init__", _hook_variable),
                (keras.Metric, "add_variable", _hook_metric_state),
                (
                    keras.optimizers.Optimizer,
                    "add_variable_from_reference",
                    _hook_slot,
                ),
                (
                    keras.layers.BatchNormalization,
                    "__init__",
                    hooks.hook_constructor,
                ),
            ):
                _undo.enter_context(_wrapped(cls, method, hook))
        _open_scopes += 1
    try:
        yield
    finally:
        with _lock:
            _open_scopes -= 1
            if _open_scopes == 0:
                _undo.close()


HOOKS = KerasHooks(hooks.install, hooks.install_for_functions, creation_hooks)


def _hook_init(
    of_model: bool, original: Callable[..., None]
) -> Callable[..., None]:
    """Wraps the `__init__` of models, or of trainers that are no models."""

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        strategy = context.current_strategy()
        if (
            isinstance(self, keras.Model) is of_model
            and strategy is not None
            and context.in_cross_replica_context()
        ):
            bind_model(self, strategy)

    return __init__


def _hook_variable(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if "distribute_strategy" in vars(self):  # `_share_new_variables`
            return
        context.check_made_in_time()
        with suspended():
            strategy = context.current_strategy()
            # With one device, a replica function may make variables as well.
            if strategy is None or not (
                strategy.plan.is_one_device
                or context.in_cross_replica_context()
            ):
                original(self, *args, **kwargs)
                return
            context.check_creation()
            context.check_no_distribution(strategy, "a new variable")
            if kwargs.get("synchronization") == "on_read":
                kwargs.setdefault("trainable", False)
            original(self, *args, **kwargs)
            _check_declaration(self)
            reference = _current.reference
            if reference is not None:
                strategy.executor.keep_together(self, reference)
            claim_variable(self, strategy)
            if isinstance(self, SyncOnReadVariable):
                self.begin(is_total=_current.makes_metric_state)

    return __init__


def _check_declaration(variable: keras.Variable) -> None:
    """Refuses a variable that can't be kept in step on replicas."""
    if variable.synchronization == "none":
        raise ValueError(
            "`NONE` variable synchronization mode is not supported with "
            f"tf.distribute strategy. Received: synchronization='none' for "
            f"variable '{variable.path}'. Expected: 'auto', 'on_write' or "
            "'on_read'."
        )
    dtype = keras.backend.standardize_dtype(variable.dtype)
    if variable.aggregation == "mean" and "float" not in dtype:
        raise ValueError(
            "A mean of integers is not an integer. Received: "
            f"aggregation='mean', dtype='{dtype}' for variable "
            f"'{variable.path}'. Expected: a float dtype, or another "
            "aggregation."
        )


def _hook_metric_state(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def add_variable(self: Any, *args: Any, **kwargs: Any) -> Any:
        with replaced(_current, makes_metric_state=True):
            return original(self, *args, **kwargs)

    return add_variable


def beside(reference: Any) -> contextlib.AbstractContextManager[None]:
    """Places variables made inside the context where `reference` is."""
    return replaced(_current, reference=reference)


def _hook_slot(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def add_variable_from_reference(
        self: Any, reference_variable: Any, *args: Any, **kwargs: Any
    ) -> Any:
        with beside(reference_variable):
            return original(self, reference_variable, *args, **kwargs)

    return add_variable_from_reference


@functools.cache
def _share_new_variables() -> None:
    """Makes one variable of those that all replicas make at the same point."""

    def __new__(cls: Any, *args: Any, **kwargs: Any) -> Any:
        call = current_call()
        if (
            call is None
            or cls is not keras.Variable
            or base_scope() is not call.scope
        ):
            return object.__new__(cls)
        is_metric_state = _current.makes_metric_state

        def make(everyone: list[Any]) -> Any:
            _check_alike(everyone)
            first_args, first_kwargs = everyone[0]
            with (
                replaced(_current, makes_metric_state=is_metric_state),
                call.runner.building(),
            ):
                return cls(*first_args, **first_kwargs)

        own = (args, kwargs)
        return call.replica.meet("the creation of a variable", make, own)

    keras.Variable.__new__ = __new__


def _check_alike(everyone: list[Any]) -> None:
    """Refuses variables that replicas declare differently."""
    declared = [
        (args[1:], {k: v for k, v in kwargs.items() if k != "initializer"})
        for args, kwargs in everyone
    ]
    for index, own in enumerate(declared):
        if own != declared[0]:
            raise ReplicaDivergenceError(
                "Replicas made different variables in one place. Received: "
                f"{_text(*declared[0])} on replica 0, {_text(*own)} on replica "
                f"{index}. Expected: the same variable on each replica, of "
                "which each has a copy. Make a variable for each replica "
                "outside of `run`, or one with an axis for the replicas."
            )


def _text(args: Any, kwargs: Any) -> str:
    named = [f"{key}={value!r}" for key, value in kwargs.items()]
    return f"Variable({', '.join([*map(repr, args), *named])})"


@contextlib.contextmanager
def _wrapped(cls: Any, name: str, hook: Callable[..., Any]) -> Iterator[None]:
    inherited = name not in vars(cls)
    original = getattr(cls, name)
    setattr(cls, name, hook(original))
    try:
        yield
    finally:
        if inherited:
            delattr(cls, name)
        else:
            setattr(cls, name, original)


@functools.cache
def install() -> None:
    """Wraps the methods of Keras that build and train models, for good."""
    build = Trainer._symbolic_build

    @functools.wraps(build)
    def _symbolic_build(self: keras.Model, *args: Any, **kwargs: Any) -> None:
        # Slots for a model of no strategy belong to none, in a scope too.
        is_plain = bound(self) is None
        with context.left() if is_plain else contextlib.nullcontext():
            build(self, *args, **kwargs)

    Trainer._symbolic_build = _symbolic_build
    for name in ("train", "test", "predict"):
        method = f"make_{name}_function"
        original = getattr(Trainer, method)
        setattr(Trainer, method, _looks_at_plain(original, name == "train"))


def _looks_at_plain(
    original: Callable[..., Any], trains: bool
) -> Callable[..., Any]:
    """Wraps a method that makes the function of `fit` or a relative."""

    @functools.wraps(original)
    def make_function(self: keras.Model, force: bool = False) -> Any:
        if bound(self) is None:
            notice_scope(self)
            # An existing train function was checked; `compile` removes it.
            if trains and not self.train_function:
                _check(self)
                notice(self)
        return original(self, force)

    return make_function


def _check(model: keras.Model) -> None:
    in_layers = {id(each) for each in model.variables}
    for variable in all_variables(model):
        # Variables of the framework's own strategies have no such owner, and
        # those of one device are plain ones.
        owner = vars(variable).get("distribute_strategy")
        if owner is None or owner.plan.is_one_device:
            continue
        if id(variable) in in_layers and owner.executor.shares_layers:
            continue
        raise StrategyMismatchError(
            f"Model '{model.name}' was made outside of any scope, and its "
            f"variable '{variable.path}' belongs to {owner!r}. Expected: all "
            "under one strategy. Make the model, its layers and its optimizer "
            "inside of the scope, or all outside, or adopt the model with "
            "`strategy.distribute(model)`."
        )
