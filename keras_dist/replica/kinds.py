"""Tells sums from means over rows, in what layers add and assign."""

import re
import warnings
import weakref
from typing import Any

import keras

from keras_dist.core.rows import scaled
from keras_dist.errors import UnsupportedModelError
from keras_dist.internals import keras_internals
from keras_dist.internals import keras_random
from keras_dist.internals import keras_saveables
from keras_dist.internals.keras_internals import LayerCall
from keras_dist.plugin.workers import Workers
from keras_dist.replica.exchange import is_float
from keras_dist.replica.exchange import is_row_shaped
from keras_dist.replica.probe import probe
from keras_dist.replica.state import ReplicaStep
from keras_dist.replica.sums import Found
from keras_dist.replica.sums import Kind

_OF_KERAS = "Exception encountered when calling"
_PROVE = "`strategy.verify(model, x, y)` compares the strategy with one device."


class Known:
    """Facts about objects, by identity, for as long as the objects live."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[weakref.ref[Any], Any]] = {}

    def get(self, about: Any) -> Any:
        """Returns what is known of an object, or `None`."""
        ref, value = self._found.get(id(about), (None, None))
        return value if ref is not None and ref() is about else None

    def set(self, about: Any, value: Any) -> None:
        """Notes a value of an object."""
        self._found[id(about)] = weakref.ref(about), value

    def clear(self) -> None:
        """Forgets all of them."""
        self._found.clear()


class Kinds:
    """The kinds of a model's losses and variables, as they become known."""

    def __init__(self, model: keras.Model) -> None:
        self._model = weakref.ref(model)
        self._calls: weakref.WeakKeyDictionary[
            keras.Layer, dict[bool | None, Found]
        ] = weakref.WeakKeyDictionary()
        self.variables = Known()
        # Whether the next step remembers gradients when they are computed.
        self.looks_at_gradients = True
        self._told = Known()
        self._watched: set[str] = set()
        self._looked_at = Known()

    def term(self, step: ReplicaStep, owner: keras.Layer, loss: Any) -> Any:
        """Scales a layer's loss; the mean over rows is then the global loss."""
        call = keras_internals.innermost_call()
        kind = Kind.UNKNOWN
        if call is not None:
            kind = self._next_term(step, call)
        has_rows = is_row_shaped(loss) and _as_many(loss, step.share.rows)
        if has_rows and kind in (Kind.UNKNOWN, Kind.COUPLED):
            # Keras sums a value a row. Made-up rows may not show this, if the
            # layer's loss is zero for them, for instance.
            kind = Kind.SUM
        if kind is Kind.COUPLED:
            raise _coupled(call.layer if call else owner)
        if kind is Kind.UNKNOWN:
            self._warn_of_term(step, owner, call)
        if kind is Kind.SUM:
            if has_rows:
                self._warn_of_rows(owner)
            if not is_float(loss):
                loss = keras.ops.cast(loss, keras.config.floatx())
            return scaled(loss, step.share.inverse)
        return loss

    def learn_variable(self, step: ReplicaStep, variable: Any) -> None:
        """Finds out what kind of number a layer assigns to a variable."""
        found = None
        call = keras_internals.innermost_call()
        if call is not None and not (
            keras_random.is_seed(variable)
            or variable.synchronization == "on_read"
        ):
            found = self._found(step, call)
        # Not before all replicas have met: others would think it known.
        self.variables.set(variable, Kind.MEAN)
        if call is None or found is None:
            return
        for each, kind in found.variables.values():
            self.variables.set(each, kind)
        kind = self.variables.get(variable)
        if id(variable) not in found.variables and found.error is not None:
            self._warn_of_variable(variable, call, _because(found))
        elif kind is Kind.COUPLED or (kind is Kind.SUM and variable.trainable):
            self._warn_of_variable(variable, call, "")

    def is_first(self, name: str) -> bool:
        """Returns `True` once for each step name, at its first run."""
        if name in self._watched:
            return False
        self._watched.add(name)
        self._looked_at.clear()
        return True

    def is_new(self, layer: keras.Layer) -> bool:
        """Returns `True` once for each layer, at its first call in the step."""
        is_new = not self._looked_at.get(layer)
        self._looked_at.set(layer, True)
        return is_new

    def warn_of_coupling(self, strategy: Any, layer: keras.Layer) -> None:
        """Warns, once, of a layer in which rows depend on each other."""
        self._tell(
            layer,
            "rows",
            f"Layer '{layer.name}' of class {type(layer).__name__} couples "
            "the rows of a batch: its output for a row depends on other "
            f"rows. Each replica of {strategy!r} calls the layer on its own "
            "rows only, which gives other numbers than one device. Expected: "
            "layers that treat each row alone, or BatchNormalization, which "
            "gets the statistics of all rows. Compute this in a "
            "`keras.losses.Loss`, which gets the rows of all replicas. Or "
            "train on one device, or on the JAX backend, where one "
            f"program sees all rows. {_PROVE}",
        )

    def _found(self, step: ReplicaStep, call: LayerCall) -> Found:
        known = self._calls.setdefault(call.layer, {})
        if call.training not in known:
            known[call.training] = probe(step, call)
        found = known[call.training]
        workers = step.replica.group.workers
        if workers is not None and not found.is_agreed:
            self._agree(step, workers, call.layer, found)
        return found

    def _agree(
        self,
        step: ReplicaStep,
        workers: Workers,
        layer: keras.Layer,
        found: Found,
    ) -> None:
        """Gives all workers what any of them has found."""
        model = self._model()
        assert model is not None
        of_model = keras_saveables.all_variables(model)

        def agree(_: list[Any]) -> None:
            with step.runner.probing():
                found.agree(of_model, workers.texts)

        step.replica.meet(f"what layer '{layer.name}' adds up", agree, None)

    def _next_term(self, step: ReplicaStep, call: LayerCall) -> Kind:
        kinds = self._found(step, call).terms
        if not kinds:
            return Kind.UNKNOWN
        if len(set(kinds)) == 1:
            return kinds[0]
        key = id(call.layer), call.training
        place = step.terms_seen.get(key, 0)
        step.terms_seen[key] = place + 1
        return kinds[place % len(kinds)]

    def _warn_of_term(
        self, step: ReplicaStep, owner: keras.Layer, call: LayerCall | None
    ) -> None:
        because = "it is not added in the `call` of a layer"
        if call is not None:
            owner = call.layer
            because = _because(self._found(step, call))
        self._tell(
            owner,
            "term",
            f"Layer '{owner.name}' adds a loss, and it is unclear whether "
            f"this is a sum or a mean over rows: {because}. keras_dist treats "
            "the loss as a mean. Add one value for each row, with rows along "
            f"the first axis, or add a mean over rows. {_PROVE}",
        )

    def _warn_of_rows(self, owner: keras.Layer) -> None:
        model = self._model()
        assert model is not None
        names = [
            name
            for name in ("train_step", "compute_loss")
            if getattr(type(model), name) is not getattr(keras.Model, name)
        ]
        if names:
            self._tell(
                owner,
                "rows",
                f"Layer '{owner.name}' adds a loss with one value for each "
                f"row, which Keras sums, but model '{model.name}' has its own "
                f"`{names[0]}`. Each replica's values are scaled so that "
                f"their sum is the global loss. Sum them in `{names[0]}`, as "
                "in `keras.ops.sum(self.losses[0])`. If you take their mean, "
                f"add the mean in the layer instead. {_PROVE}",
            )

    def _warn_of_variable(
        self, variable: Any, call: LayerCall, because: str
    ) -> None:
        because = because or (
            "the value for all rows is neither the sum nor the mean of the "
            "values for both halves of the rows"
        )
        self._tell(
            variable,
            "value",
            f"Layer '{call.layer.name}' assigns variable '{variable.path}' in "
            "its `call`, but a replica sees only its own rows there: "
            f"{because}. The variable gets the mean over rows of the "
            "replicas' values, which is not the value on one device. Assign "
            "sums or means over rows, count in a metric, or use one device. "
            f"{_PROVE}",
        )

    def _tell(self, about: Any, what: str, text: str) -> None:
        told = self._told.get(about) or ()
        if what not in told:
            self._told.set(about, (*told, what))
            warnings.warn(text, stacklevel=2)


def _because(found: Found) -> str:
    error = found.error
    if error is None:
        return "for made-up rows, it is zero or random"
    # Keras adds lines around the error's own, some of them in colours.
    lines = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).split("\n")
    own = [line for line in lines if line and not line.startswith(_OF_KERAS)]
    return (
        f"the layer can't be called on made-up rows ({type(error).__name__}: "
        f"{' '.join(own[:1])[:200]})"
    )


def _as_many(loss: Any, rows: Any) -> bool:
    """Returns whether axis 0 is as long as a replica's number of rows."""
    size = loss.shape[0]
    if size is None or not isinstance(rows, int):
        return size is None
    return bool(size == max(rows, 1))


def _coupled(layer: keras.Layer) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"Layer '{layer.name}' of class {type(layer).__name__} adds a loss "
        "that is neither a sum nor a mean over rows: the loss of a batch "
        "does not follow from the losses of its halves. Each replica sees "
        "only its own rows. Expected: `add_loss` of one value for each row, "
        "of a mean over rows, or of a sum over rows. A sum divided by a "
        "constant is a sum over rows, but a mean over the rows that a mask "
        "leaves is neither. Or compute the loss in a `keras.losses.Loss`, "
        "which gets the rows of all replicas, or use one device."
    )
