"""The class that a strategy gives to a variable of its own."""

import keras

from keras_dist.errors import StrategyMismatchError
from keras_dist.errors import UnsupportedModelError
from keras_dist.plugin.storage import ShardedStorage
from keras_dist.plugin.storage import Storage
from keras_dist.replica.on_read import SyncOnReadVariable
from keras_dist.replica.on_read import UnaggregatedVariable
from keras_dist.replica.variables import CentralVariable
from keras_dist.replica.variables import MirroredVariable
from keras_dist.replica.variables import ShardedVariable


def adopt(variable: keras.Variable) -> None:
    """Changes a variable's class to that of a distributed one, only here."""
    if type(variable) not in (keras.Variable, MirroredVariable):
        return
    if variable.synchronization != "on_read":
        storage = variable.distribute_strategy.executor.storage(variable)
        variable.__class__ = _class_for(storage)
    elif variable.aggregation == "none":
        variable.__class__ = UnaggregatedVariable
    else:
        variable.__class__ = SyncOnReadVariable
    # A change of class hides the attributes from Python 3.13.0's collector of
    # garbage, until one is set: cycles with variables would stay for ever.
    attributes = vars(variable)
    attributes["distribute_strategy"] = attributes["distribute_strategy"]


def _class_for(storage: Storage) -> type[MirroredVariable]:
    if isinstance(storage, ShardedStorage):
        return ShardedVariable
    # A kind of another name is read like copies.
    return CentralVariable if storage.kind == "central" else MirroredVariable


def adopt_slot(variable: keras.Variable, reference: keras.Variable) -> None:
    """Adopts a variable that an optimizer has for a reference variable."""
    if "distribute_strategy" not in vars(variable):
        variable.distribute_strategy = reference.distribute_strategy
    adopt(variable)
    if not isinstance(variable, ShardedVariable):
        raise UnsupportedModelError(
            f"The optimizer's variable '{variable.path}' can't be divided "
            f"into parts.\nReceived: a {type(variable).__name__} with "
            f"synchronization={variable.synchronization!r}. Expected: a "
            "keras.Variable with the default synchronization. Or leave out "
            'optimizer_state="sharded".'
        )


def check_owner(variable: keras.Variable, strategy: object) -> None:
    """Raises `StrategyMismatchError` for a variable of another strategy."""
    owner = vars(variable).get("distribute_strategy")
    if owner is not None and owner is not strategy:
        raise StrategyMismatchError(
            f"Variable '{variable.path}' was made under {owner!r} but is used "
            f"under {strategy!r}. Expected: one strategy. Make the model, its "
            "layers and its optimizer under the same `strategy.scope()`."
        )
