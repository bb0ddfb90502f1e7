"""The private names of Keras that we use are where we look for them.

A failure here means that Keras moved something: the tables in
`keras_dist/internals` say what each is for.
"""

import inspect

import keras
import pytest
from keras.src.backend.common import global_state
from keras.src.losses import loss as losses
from keras.src.models import cloning
from keras.src.saving import saving_lib

from keras_dist.internals import keras_internals
from keras_dist.internals import keras_optimizers
from keras_dist.internals import keras_random


@pytest.mark.smoke
@pytest.mark.runs_on("jax", "tensorflow", "torch")
@pytest.mark.parametrize(
    ("owner", "name", "parameters"),
    [
        (keras.losses.Loss, "__call__", ["y_true", "y_pred", "sample_weight"]),
        (
            losses,
            "reduce_weighted_values",
            ["values", "sample_weight", "mask", "reduction", "dtype"],
        ),
        (losses, "scale_loss_for_distribution", ["value"]),
        (losses, "unscale_loss_for_distribution", ["value"]),
        (keras.layers.BatchNormalization, "_moments", ["inputs", "mask"]),
        (keras.random.SeedGenerator, "next", ["ordered"]),
        (keras.Layer, "_clear_losses", []),
        (keras.Layer, "_maybe_build", ["call_spec"]),
        (
            keras.Metric,
            "add_variable",
            ["shape", "initializer", "dtype", "aggregation", "name"],
        ),
        (keras.Model, "_symbolic_build", ["iterator", "data_batch"]),
        (keras_internals.Trainer, "__init__", []),
        (keras_internals.Trainer, "make_train_function", ["force"]),
        (keras_internals.Trainer, "make_test_function", ["force"]),
        (keras_internals.Trainer, "make_predict_function", ["force"]),
        (
            keras.optimizers.Optimizer,
            "apply",
            ["grads", "trainable_variables"],
        ),
        (
            keras.optimizers.LossScaleOptimizer,
            "apply",
            ["grads", "trainable_variables"],
        ),
        (keras.optimizers.Optimizer, "_clip_gradients", ["grads"]),
        (
            keras.optimizers.Optimizer,
            "_filter_empty_gradients",
            ["grads", "vars"],
        ),
        (keras.optimizers.Optimizer, "_use_weight_decay", ["variable"]),
        (keras.optimizers.Optimizer, "_track_variable", ["variable"]),
        (keras.optimizers.Optimizer, "_var_key", ["variable"]),
        (keras.optimizers.LossScaleOptimizer, "check_finite", ["grads"]),
        (saving_lib, "_serialize_model_as_json", ["model"]),
        (
            saving_lib,
            "_model_from_config",
            ["config_json", "custom_objects", "compile", "safe_mode"],
        ),
        (
            cloning,
            "_clone_sequential_model",
            ["model", "clone_function", "input_tensors"],
        ),
        (
            cloning,
            "_clone_functional_model",
            ["model", "clone_function", "input_tensors", "call_function"],
        ),
        (keras.Model, "from_config", ["config", "custom_objects"]),
        (keras.Sequential, "from_config", ["config", "custom_objects"]),
    ],
)
def test_seam_has_the_signature_we_wrap(owner, name, parameters):
    seam = getattr(owner, name)
    actual = [p for p in inspect.signature(seam).parameters if p != "self"]
    assert actual == parameters, f"{owner} .{name} changed"


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


def test_layers_know_their_losses_by_id():
    layer = keras.layers.Dense(1, activity_regularizer="l2")
    assert layer._loss_ids == set()
    assert hasattr(layer, "_flatten_layers")


def test_metric_state_is_marked_on_read():
    metric = keras.metrics.Mean()
    assert {v.synchronization for v in metric.variables} == {"on_read"}


def test_states_of_seeds_are_known_by_name():
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


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("dropout", ["inputs", "rate", "noise_shape", "seed"]),
        ("categorical", ["logits", "num_samples", "dtype", "seed"]),
        ("shuffle", ["x", "axis", "seed"]),
        ("normal", ["shape", "mean", "stddev", "dtype", "seed"]),
        ("uniform", ["shape", "minval", "maxval", "dtype", "seed"]),
        ("randint", ["shape", "minval", "maxval", "dtype", "seed"]),
        ("truncated_normal", ["shape", "mean", "stddev", "dtype", "seed"]),
        ("gamma", ["shape", "alpha", "dtype", "seed"]),
        ("binomial", ["shape", "counts", "probabilities", "dtype", "seed"]),
        ("beta", ["shape", "alpha", "beta", "dtype", "seed"]),
    ],
)
def test_draws_are_where_layers_find_them(name, parameters):
    draw = getattr(keras_random.random_backend, name)
    assert list(inspect.signature(draw).parameters) == parameters


def test_custom_gradients_are_where_keras_looks_for_them(monkeypatch):
    core = keras_internals.backend_core
    monkeypatch.setattr(core, "custom_gradient", lambda f: ("found", f))
    assert keras.ops.custom_gradient(1) == ("found", 1)


def test_what_can_be_copied_has_one_base():
    for cls in (
        keras.Layer,
        keras.Loss,
        keras.Metric,
        keras.Model,
        keras.optimizers.Optimizer,
    ):
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


def test_layers_add_losses_in_one_place():
    parameters = inspect.signature(keras.Layer.add_loss).parameters
    assert list(parameters) == ["self", "loss"]
