"""The one door to Keras' private names in the front end.

| name | why |
|---|---|
| `keras.src.backend.common.global_state` | replica threads inherit it |
| `keras.src.losses.loss` | reductions over replicas instead of one |
| `keras.src.backend.{get,set}_keras_mask` | masks travel with gathered rows |
| `keras.src.random.seed_generator.global_seed_generator` | made beforehand |
| the name `seed_generator_state` | of the states of seed generators |
| `keras.Model._initial_epoch` | where `fit` goes on after a restart |
| `keras.Variable._value` | the value itself, whatever scope is open |
| `keras.Model._symbolic_build` | builds under the scope |
| `keras.Layer._maybe_build` | replicas that call a layer first build it once |
| `keras.src.trainers.data_adapters` | tells data apart, feeds `fit` batches |
| `keras.src.utils.backend_utils.in_tf_graph` | no data is read in a graph |

`tests/unit/test_keras_internals.py` fails readably when one of them moves.
"""

import itertools
import random
from collections.abc import Iterator
from typing import Any

import keras
from keras.src import backend as keras_backend
from keras.src.backend.common import global_state
from keras.src.losses import loss as losses
from keras.src.random.seed_generator import global_seed_generator
from keras.src.trainers import data_adapters
from keras.src.trainers.data_adapters import GeneratorDataAdapter
from keras.src.trainers.data_adapters import data_adapter_utils
from keras.src.trainers.data_adapters import py_dataset_adapter
from keras.src.utils.backend_utils import in_tf_graph

from keras_dist import compilation
from keras_dist import context
from keras_dist.errors import UnsupportedKerasError

get_mask = keras_backend.get_keras_mask
set_mask = keras_backend.set_keras_mask
is_tf_dataset = data_adapters.is_tf_dataset
is_torch_dataloader = data_adapters.is_torch_dataloader
is_grain_dataset = data_adapters.is_grain_dataset
is_torch_tensor = data_adapter_utils.is_torch_tensor

OLDEST_KERAS = (3, 14)
FIRST_KERAS_TOO_NEW = (3, 16)

_NOT_INHERITED = {
    "stateless_scope",
    "current_call_ctx",
    "torch_device",
}
_NAMES = "name_scope_stack"
_GLOBAL_SEED = "global_seed_generator"
_COMPILATION = "keras_dist_compilation"

__all__ = [
    "GeneratorDataAdapter",
    "all_metrics",
    "all_variables",
    "build_from",
    "check_keras",
    "get_mask",
    "global_seed",
    "in_tf_graph",
    "is_grain_dataset",
    "is_tf_dataset",
    "is_torch_dataloader",
    "is_torch_tensor",
    "inherit_thread_state",
    "is_seed",
    "losses",
    "make_global_seed",
    "read_with_workers",
    "set_global_seed",
    "set_initial_epoch",
    "set_mask",
    "has_value",
    "set_stateless_scope",
    "stateless_scope",
    "thread_state",
    "value_of",
]


def check_keras() -> None:
    """Refuses a Keras that keras_dist was not made for.

    Raises:
        UnsupportedKerasError: If its version is outside of the range that we
            test, or if its NNX mode is on.
    """
    version = tuple(int(part) for part in keras.__version__.split(".")[:2])
    if not OLDEST_KERAS <= version < FIRST_KERAS_TOO_NEW:
        oldest, too_new = (
            ".".join(map(str, bound))
            for bound in (OLDEST_KERAS, FIRST_KERAS_TOO_NEW)
        )
        raise UnsupportedKerasError(
            f"keras_dist works with Keras {oldest} up to, not including, "
            f"{too_new}. Received: Keras {keras.__version__}. Install one "
            f"with `pip install 'keras>={oldest},<{too_new}'`."
        )
    if keras.config.is_nnx_enabled():
        raise UnsupportedKerasError(
            "keras_dist does not support Keras' NNX mode, which keeps "
            "variables in Flax objects. Received: NNX enabled. Unset "
            "KERAS_NNX_ENABLED, or `nnx_enabled` in keras.json."
        )


def all_variables(model: keras.Model) -> list[keras.Variable]:
    """Every variable of a model, its metrics and its optimizer."""
    variables = list(model.variables)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        variables += optimizer.variables
    variables += [v for m in all_metrics(model) for v in m.variables]
    return list({id(v): v for v in variables}.values())


def all_metrics(model: keras.Model) -> list[keras.metrics.Metric]:
    """A model's metrics, and those that its own `metrics` leaves out.

    Keras' steps update the latter too: the running loss, for instance.
    """
    metrics = [*model.metrics, *keras.Model.metrics.fget(model)]
    return list({id(m): m for m in metrics}.values())


def make_global_seed() -> None:
    """Makes Keras' global seed generator, which belongs to no strategy.

    Inside of a replica it would be too late, and inside of a scope it would
    be that strategy's. Python's random state is put back, as if it had not
    been made yet.
    """
    if global_state.get_global_attribute(_GLOBAL_SEED) is None:
        state = random.getstate()
        with context.in_replica(None):
            global_seed_generator()
        random.setstate(state)


def global_seed() -> list[int] | None:
    """The state of Keras' global seed generator, if it has been made."""
    generator = global_state.get_global_attribute(_GLOBAL_SEED)
    if generator is None:
        return None
    state: list[int] = keras.ops.convert_to_numpy(generator.state).tolist()
    return state


def set_global_seed(state: list[int] | None) -> None:
    """Goes back to what `global_seed` returned, here or elsewhere."""
    if state is None:
        global_state.set_global_attribute(_GLOBAL_SEED, None)
        return
    make_global_seed()
    generator = global_state.get_global_attribute(_GLOBAL_SEED)
    keras.Variable.assign(generator.state, state)


def set_initial_epoch(model: keras.Model, epoch: int | None) -> None:
    """Makes `fit` begin with a later epoch, whatever it is told.

    Args:
        model: A `keras.Model`.
        epoch: Integer from 0, or `None` to begin where `fit` is told to.
    """
    model._initial_epoch = epoch


def build_from(model: keras.Model, batch: Any) -> None:
    """Builds what a model's first step would build, from shapes alone.

    Args:
        model: A compiled `keras.Model`.
        batch: As its train step gets it.
    """
    model._symbolic_build(data_batch=batch)


def thread_state() -> dict[str, Any]:
    """What a replica's thread takes over from the caller's."""
    make_global_seed()
    state = {
        name: value
        for name, value in vars(global_state.GLOBAL_STATE_TRACKER).items()
        if name not in _NOT_INHERITED
    }
    # A list of its own for each thread, with the same names to begin with.
    state[_NAMES] = tuple(global_state.get_global_attribute(_NAMES) or ())
    state[_COMPILATION] = compilation.thread_state()
    return state


def inherit_thread_state(state: dict[str, Any]) -> None:
    """Gives this thread the state of another, from `thread_state`."""
    for name, value in state.items():
        if name == _COMPILATION:
            compilation.inherit(value)
            continue
        own = list(value) if name == _NAMES else value
        global_state.set_global_attribute(name, own)


def is_seed(variable: keras.Variable) -> bool:
    """Whether a variable is the state of a `keras.random.SeedGenerator`.

    Replicas' seeds are not compared, which would wait for the device: each
    draws as often as the others, and what makes their draws differ is not
    stored.
    """
    return bool(variable.name == "seed_generator_state")


def value_of(variable: keras.Variable) -> Any:
    """The framework's value of a variable, whatever scope is open."""
    return variable._value


def has_value(variable: keras.Variable) -> bool:
    """Whether a variable has been given a value yet."""
    return vars(variable).get("_value") is not None


def stateless_scope() -> keras.StatelessScope | None:
    """The stateless scope that is open in this thread, if one is."""
    scope: keras.StatelessScope | None = global_state.get_global_attribute(
        "stateless_scope"
    )
    return scope


def set_stateless_scope(
    scope: keras.StatelessScope | None,
) -> keras.StatelessScope | None:
    """Makes a stateless scope current; returns the one before."""
    before = stateless_scope()
    global_state.set_global_attribute("stateless_scope", scope)
    return before


def read_with_workers(dataset: keras.utils.PyDataset) -> Iterator[Any]:
    """The batches of a `PyDataset`, in order, by its own workers."""
    enqueuer = py_dataset_adapter.OrderedEnqueuer(
        dataset,
        workers=dataset.workers,
        use_multiprocessing=dataset.use_multiprocessing,
        max_queue_size=dataset.max_queue_size,
    )
    enqueuer.start()
    try:
        yield from itertools.islice(enqueuer.get(), dataset.num_batches)
    finally:
        enqueuer.stop()
