"""Replicas that multiply losses by their share of rows, and the gradients of
which may have been summed over replicas already."""

from typing import Any
from typing import NoReturn

from keras_dist.errors import UnsupportedModelError
from keras_dist.plugins import current_call
from keras_dist.plugins import current_replica
from keras_dist.plugins import current_step


class WeighsLosses:
    """A replica whose losses count by its share when it differentiates them.

    Its gradients are of variables themselves, and those in parts are sums over
    all replicas already. `FSDPReplica` is one, whose module is imported late.
    """


def weighing_replica() -> Any:
    """Returns the replica of this thread's step, if it weighs losses."""
    replica = getattr(current_step(), "replica", None)
    return replica if isinstance(replica, WeighsLosses) else None


def differentiating() -> Any:
    """Returns the replica of this thread's step or function, if its gradients
    may be sums already."""
    replica = getattr(current_replica(), "replica", None)
    return replica if isinstance(replica, WeighsLosses) else None


def check_not_in_function(what: str) -> None:
    """Refuses gradients that would not be those of one replica."""
    if current_call() is None or differentiating() is None:
        return
    raise UnsupportedModelError(
        f"`{what}` was called in a function that `strategy.run` calls, on "
        "variables in parts, whose gradients are sums over workers. Expected: "
        "`keras_dist.value_and_grad` or `gradient`, and its gradients given "
        "to `optimizer.apply`. Or use variables='mirrored'."
    )


def refuse_derivatives(what: str) -> NoReturn:
    raise UnsupportedModelError(
        f"{what} was called in a step on variables in parts, whose gradients "
        "are sums over workers.\nExpected: `keras_dist.value_and_grad`, and "
        "its gradients given to `optimizer.apply`. Or `loss.backward()`, and "
        "then gradients from `variable.value.grad`. Or use "
        "variables='mirrored'."
    )
