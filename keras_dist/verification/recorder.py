"""An optimizer that keeps gradients, in place of a model's own."""

from typing import Any

import keras
from keras import ops

from keras_dist.internals.keras_internals import trainable_variables
from keras_dist.verification.copies import optimizers_of

SLOT = "gradient"


class Recorder(keras.optimizers.Optimizer):
    """An optimizer that only records the last gradient of each variable.

    It gets gradients as any optimizer does, summed over replicas, so it records
    the ones that any other would use. It does not clip.
    """

    # Each part of a slot depends on the same part of a gradient only.
    is_elementwise = True

    def __init__(self, learning_rate: float = 0.0, **kwargs: Any) -> None:
        super().__init__(learning_rate=learning_rate, **kwargs)

    def build(self, variables: Any) -> None:
        """Makes a slot for the gradient of each variable."""
        if self.built:
            return
        super().build(variables)
        self.gradients = self.add_optimizer_variables(variables, SLOT)

    def update_step(
        self, gradient: Any, variable: Any, learning_rate: Any
    ) -> None:
        """Keeps a gradient in the variable's slot."""
        slot = self.gradients[self._get_variable_index(variable)]
        # Sparse gradients, rows of an embedding, can be added but not assigned.
        self.assign(slot, ops.multiply(slot, 0.0))
        self.assign_add(slot, ops.cast(gradient, slot.dtype))


class Recorders:
    """Recorders in place of a model's optimizers, until `undo`."""

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._own = optimizers_of(model)
        self._recorders: dict[int, Recorder] = {}
        for name, optimizer in self._own.items():
            recorder = self._recorders.setdefault(id(optimizer), Recorder())
            setattr(model, name, _scaled_like(optimizer, recorder))
        compile_again(model)

    def gradients(self) -> dict[int, Any]:
        """Returns the gradients that were kept, by the id of their variable."""
        found = {}
        for recorder in self._recorders.values():
            if recorder.built:
                trained = trainable_variables(recorder)
                slots = zip(trained, recorder.gradients, strict=True)
                for variable, slot in slots:
                    found[id(variable)] = ops.convert_to_numpy(slot)
        return found

    def undo(self) -> None:
        """Gives the model its own optimizers back."""
        for name, optimizer in self._own.items():
            setattr(self._model, name, optimizer)
        compile_again(self._model)


def compile_again(model: keras.Model) -> None:
    """Drops a model's compiled functions, which are made anew when needed."""
    model.train_function = None
    model.test_function = None
    model.predict_function = None


def _scaled_like(optimizer: Any, recorder: Recorder) -> Any:
    """Returns the recorder with the loss scaling of another optimizer."""
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        recorder.loss_scale_factor = optimizer.loss_scale_factor
        return recorder
    return keras.optimizers.LossScaleOptimizer(
        recorder, initial_scale=optimizer.initial_scale
    )
