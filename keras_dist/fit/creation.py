"""Hooks on the creation of models and variables under a strategy."""

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

import keras

from keras_dist.core import context
from keras_dist.errors import ReplicaDivergenceError
from keras_dist.errors import StrategyMismatchError
from keras_dist.fit.binding import bind_model
from keras_dist.fit.binding import claim_variable
from keras_dist.fit.plain_models import notice
from keras_dist.fit.plain_models import notice_scope
from keras_dist.internals.hooks import as_hook
from keras_dist.internals.keras_saveables import all_variables
from keras_dist.internals.keras_saveables import layer_variables
from keras_dist.plugin.front_end import bound
from keras_dist.replica.on_read import SyncOnReadVariable
from keras_dist.replica.scopes import base_scope
from keras_dist.replica.scopes import suspended
from keras_dist.replica.state import current_call


class _Creating(threading.local):
    def __init__(self) -> None:
        self.makes_metric_state = False
        # The variable for which an optimizer is making a slot.
        self.reference: Any = None


_creating = _Creating()


def hook_init(
    of_model: bool, original: Any, self: Any, /, *args: Any, **kwargs: Any
) -> None:
    """Stands for `__init__` of models, or of trainers that are no models.

    A `keras.Model` is bound once it is a layer too. Other classes may
    initialize the trainer before or after the layer.
    """
    original(self, *args, **kwargs)
    strategy = context.current_strategy()
    if (
        isinstance(self, keras.Model) is of_model
        and strategy is not None
        and context.in_cross_replica_context()
    ):
        bind_model(self, strategy)


@as_hook
def hook_variable(
    original: Any, self: Any, /, *args: Any, **kwargs: Any
) -> None:
    """Stands for `__init__` of variables, which join an open scope."""
    if "distribute_strategy" in vars(self):  # another replica has made it
        return
    if _is_shared(type(self)):
        _share_from_now_on()
        _shared(self, args, kwargs)
        return
    context.check_made_in_time()
    with suspended():
        strategy = context.current_strategy()
        # With one device, a replica function may make variables as well.
        if strategy is None or not (
            strategy.plan.is_one_device or context.in_cross_replica_context()
        ):
            original(self, *args, **kwargs)
            return
        context.check_creation()
        context.check_no_distribution(strategy, "a new variable")
        if kwargs.get("synchronization") == "on_read":
            kwargs.setdefault("trainable", False)
        reference = _creating.reference
        with strategy.executor.creating_beside(reference):
            original(self, *args, **kwargs)
        _check_declaration(self)
        if reference is not None:
            strategy.executor.keep_together(self, reference)
        claim_variable(self, strategy)
        if isinstance(self, SyncOnReadVariable):
            self.begin(is_total=_creating.makes_metric_state)


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


@as_hook
def hook_metric_state(
    original: Any, self: Any, /, *args: Any, **kwargs: Any
) -> Any:
    """Stands for `Metric.add_variable`."""
    with context.replaced(_creating, makes_metric_state=True):
        return original(self, *args, **kwargs)


def beside(
    reference: keras.Variable | None,
) -> contextlib.AbstractContextManager[None]:
    """Places variables made inside the context where `reference` is."""
    return context.replaced(_creating, reference=reference)


@as_hook
def hook_slot(
    original: Any,
    self: Any,
    /,
    reference_variable: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Stands for the method by which an optimizer makes a slot."""
    with beside(reference_variable):
        return original(self, reference_variable, *args, **kwargs)


def _is_shared(cls: type) -> bool:
    """Returns whether replicas that make a variable here make one."""
    call = current_call()
    is_new = call is not None and base_scope() is call.scope
    return is_new and cls is keras.Variable


def _shared(new: object, args: object, kwargs: object) -> Any:
    """Returns the one variable that replicas make at the same point.

    `new` is a new object, or `None` to make one.
    """
    call = current_call()
    assert call is not None
    is_metric_state = _creating.makes_metric_state

    def make(everyone: list[Any]) -> Any:
        _check_alike([entry[1:] for entry in everyone])
        given = [entry[0] for entry in everyone if entry[0] is not None]
        first = given[0] if given else object.__new__(keras.Variable)
        with (
            context.replaced(_creating, makes_metric_state=is_metric_state),
            call.runner.building(),
        ):
            first.__init__(*everyone[0][1], **everyone[0][2])
        return first

    local_entry = (new, args, kwargs)
    return call.replica.rendezvous(
        "the creation of a variable", make, local_entry
    )


@functools.cache
def _share_from_now_on() -> None:
    """Has replicas that come later get the variable that the first one makes.

    This is for good: before Python 3.14, a class that had a `__new__` can't be
    called without one.
    """

    def __new__(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_shared(cls):
            return object.__new__(cls)
        return _shared(None, args, kwargs)

    keras.Variable.__new__ = __new__


def _check_alike(everyone: list[Any]) -> None:
    """Refuses variables that replicas declare differently."""
    declared = [
        (args[1:], {k: v for k, v in kwargs.items() if k != "initializer"})
        for args, kwargs in everyone
    ]
    for index, declaration in enumerate(declared):
        if declaration != declared[0]:
            raise ReplicaDivergenceError(
                "Replicas made different variables in the same place.\n"
                f"Received: {_text(*declared[0])} on replica 0, "
                f"{_text(*declaration)} on replica {index}. Expected: the same "
                "variable on each replica, which then has its own copy. For a "
                "different variable on each replica, make the variables "
                "outside of `run`, or make one variable with an axis for the "
                "replicas."
            )


def _text(args: Any, kwargs: Any) -> str:
    named = [f"{key}={value!r}" for key, value in kwargs.items()]
    return f"Variable({', '.join([*map(repr, args), *named])})"


@as_hook
def hook_symbolic_build(
    original: Any, self: Any, /, *args: Any, **kwargs: Any
) -> None:
    """Stands for the method that builds a model by its first batch."""
    is_plain = bound(self) is None
    with _left_scopes() if is_plain else contextlib.nullcontext():
        original(self, *args, **kwargs)


def hook_make_function(
    name: str, original: Any, self: keras.Model, force: bool = False
) -> Any:
    """Stands for the method that makes the function of `fit` or a relative."""
    if bound(self) is not None:
        return original(self, force)
    notice_scope(self)
    before = getattr(self, name)
    # An existing train function was checked; `compile` removes it.
    if name == "train_function" and not before:
        _check(self)
        notice(self)
    result = original(self, force)
    made = getattr(self, name)
    if made is not before and context.in_cross_replica_context():
        setattr(self, name, _leaving_scopes(made))
    return result


def _leaving_scopes(function: Any) -> Any:
    """Returns a function that runs as if no scope was open."""

    @functools.wraps(function)
    def apart(*args: Any, **kwargs: Any) -> Any:
        with _left_scopes():
            return function(*args, **kwargs)

    return apart


@contextlib.contextmanager
def _left_scopes() -> Iterator[None]:
    """Leaves the open scope: what a plain model makes in it belongs to none.

    These are its optimizer's slots and its metrics' states, and its own
    variables if it is built by its first batch.
    """
    strategy: Any = context.current_strategy()
    if strategy is None:
        yield
        return
    with context.left(), strategy.executor.left_scope():
        yield


def _check(model: keras.Model) -> None:
    in_layers = {id(variable) for variable in layer_variables(model)}
    for variable in all_variables(model):
        # Variables of the framework's own strategies have no such owner, and
        # those of one device are plain ones.
        owner = vars(variable).get("distribute_strategy")
        if owner is None or owner.plan.is_one_device:
            continue
        if id(variable) in in_layers and owner.executor.shares_layers:
            continue
        raise StrategyMismatchError(
            f"Model '{model.name}' was made outside of any scope, but its "
            f"variable '{variable.path}' belongs to {owner!r}.\nExpected: a "
            "model whose parts all belong to one strategy. Make the model, "
            "its layers and its optimizer inside of the scope, or all of "
            "them outside. Or adopt the model with "
            "`strategy.distribute(model)`."
        )
