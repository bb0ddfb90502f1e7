"""The private names of Keras that we use are where we look for them.

A failure here means that Keras moved something: the tables in
`keras_dist/internals` say what each is for.
"""

import inspect
import operator

import keras
import pytest
from keras.src.backend.common import global_state

from keras_dist.internals import keras_internals
from keras_dist.internals import keras_optimizers
from keras_dist.internals import keras_random

# What we wrap, and the arguments that we pass on.
SEAMS = {
    "losses.loss.reduce_weighted_values": (
        "values sample_weight mask reduction dtype"
    ),
    "losses.loss.scale_loss_for_distribution": "value",
    "losses.loss.unscale_loss_for_distribution": "value",
    "losses.Loss.__call__": "y_true y_pred sample_weight",
    "layers.BatchNormalization._moments": "inputs mask",
    "layers.Layer._clear_losses": "",
    "layers.Layer._maybe_build": "call_spec",
    "layers.Layer.add_loss": "loss",
    "metrics.Metric.add_variable": "shape initializer dtype aggregation name",
    "models.Model._symbolic_build": "iterator data_batch",
    "optimizers.Optimizer.apply": "grads trainable_variables",
    "optimizers.Optimizer._clip_gradients": "grads",
    "optimizers.Optimizer._filter_empty_gradients": "grads vars",
    "optimizers.Optimizer._use_weight_decay": "variable",
    "optimizers.Optimizer._track_variable": "variable",
    "optimizers.Optimizer._var_key": "variable",
    "optimizers.LossScaleOptimizer.apply": "grads trainable_variables",
    "optimizers.LossScaleOptimizer.check_finite": "grads",
    "saving.saving_lib._serialize_model_as_json": "model",
    "saving.saving_lib._model_from_config": (
        "config_json custom_objects compile safe_mode"
    ),
    "models.cloning._clone_sequential_model": (
        "model clone_function input_tensors"
    ),
    "models.cloning._clone_functional_model": (
        "model clone_function input_tensors call_function"
    ),
    "models.Model.from_config": "config custom_objects",
    "models.Sequential.from_config": "config custom_objects",
    "random.SeedGenerator.next": "ordered",
    **{
        f"models.Model.make_{each}_function": "force"
        for each in ("train", "test", "predict")
    },
}
DRAWS = {
    "dropout": "inputs rate noise_shape seed",
    "categorical": "logits num_samples dtype seed",
    "shuffle": "x axis seed",
    "normal": "shape mean stddev dtype seed",
    "uniform": "shape minval maxval dtype seed",
    "randint": "shape minval maxval dtype seed",
    "truncated_normal": "shape mean stddev dtype seed",
    "gamma": "shape alpha dtype seed",
    "binomial": "shape counts probabilities dtype seed",
    "beta": "shape alpha beta dtype seed",
}


def _arguments(function):
    names = [n for n in inspect.signature(function).parameters if n != "self"]
    return " ".join(names)


@pytest.mark.smoke
@pytest.mark.runs_on("jax", "tensorflow", "torch")
def test_what_we_wrap_has_the_arguments_that_we_pass():
    found = {
        place: _arguments(operator.attrgetter(place)(keras.src))
        for place in SEAMS
    }
    assert found == SEAMS
    assert _arguments(keras_internals.Trainer.__init__) == ""
    backend = keras_random.random_backend
    found = {name: _arguments(getattr(backend, name)) for name in DRAWS}
    assert found == DRAWS


@pytest.mark.smoke
def test_thread_state_is_where_scopes_are_kept():
    scope = keras.StatelessScope()
    with scope:
        assert global_state.get_global_attribute("stateless_scope") is scope
        assert "stateless_scope" not in keras_internals.thread_state()
    with keras.name_scope("named"):
        names = [
            name
            for name, value in vars(global_state.GLOBAL_STATE_TRACKER).items()
            if isinstance(value, list) and value
        ]
        assert names == ["name_scope_stack"]


def test_marks_that_tell_what_a_thing_is():
    layer = keras.layers.Dense(1, activity_regularizer="l2")
    assert layer._loss_ids == set()
    assert hasattr(layer, "_flatten_layers")
    metric = keras.metrics.Mean()
    assert {v.synchronization for v in metric.variables} == {"on_read"}
    generator = keras.random.SeedGenerator(1)
    assert keras_random.is_seed(generator.state)
    assert not keras_random.is_seed(keras.Variable(0.0))


def test_the_value_is_read_past_scopes():
    variable = keras.Variable(1.0)
    assert keras_internals.has_value(variable)
    with keras.StatelessScope():
        variable.assign(2.0)
        value = keras_internals.value_of(variable)
    assert float(keras.ops.convert_to_numpy(value)) == 1.0


@pytest.mark.parametrize("name", ["SGD", "Nadam"])
def test_an_optimizer_is_read_where_it_keeps_things(name):
    variable = keras.Variable([1.0, 2.0], name="whole")
    optimizer = getattr(keras.optimizers, name)(0.5)
    optimizer.build([variable])
    assert keras_optimizers.trainable_variables(optimizer) == [variable]
    rate = keras_optimizers.learning_rate_of(optimizer)
    assert rate is optimizer.learning_rate
    assert keras_internals.is_of_keras(type(optimizer))
    before = len(optimizer.variables)
    more = keras.Variable(0.0)
    keras_optimizers.track_variable(optimizer, more)
    assert optimizer.variables[before:] == [more]
    keras_internals.name_like(more, variable)
    assert more.path == variable.path


def test_compile_tells_what_it_was_given():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    loss = keras.losses.MeanSquaredError()
    model.compile("sgd", loss, metrics=["mae"])
    given = keras_internals.compile_arguments(model)
    assert (given["loss"], given["metrics"]) == (loss, ["mae"])

    class Own(keras.Model):
        def compile(self, rate):
            super().compile(keras.optimizers.SGD(rate))

    own = Own()
    own.compile(0.1)
    assert keras_internals.compile_arguments(own) is None


def test_names_are_counted_where_we_look():
    before = keras_internals.name_counts()
    first = keras.layers.Dense(1).name
    assert keras_internals.name_counts() != before
    keras_internals.set_name_counts(before)
    assert keras.layers.Dense(1).name == first


def test_custom_gradients_are_where_keras_looks_for_them(monkeypatch):
    core = keras_internals.backend_core
    monkeypatch.setattr(core, "custom_gradient", lambda f: ("found", f))
    assert keras.ops.custom_gradient(1) == ("found", 1)


def test_what_can_be_copied_has_one_base():
    made = keras.Layer, keras.Loss, keras.Metric, keras.Model
    for cls in (*made, keras.optimizers.Optimizer):
        assert issubclass(cls, keras_internals.Saveable)
        assert cls.__reduce__ is keras_internals.Saveable.__reduce__


def test_the_frame_of_a_call_has_its_layer():
    seen = []

    class Looks(keras.layers.Layer):
        def call(self, x):
            seen.append(keras_internals.innermost_layer())
            return x

    layer = Looks()
    layer(keras.ops.ones((2, 1)))
    assert seen[-1] is layer
    assert keras_internals.innermost_layer() is None
