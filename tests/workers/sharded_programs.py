"""Programs that run one way under a strategy and one way in plain Keras.

Each takes a function that opens the scope in which it makes models, and returns
what it computed as a dict of arrays.
"""

import contextlib
import functools

import keras
import numpy as np
from keras import layers
from keras import ops

import keras_dist
from keras_dist.replica.variables import ShardedVariable
from parity.harness import flat
from parity.harness import set_initial_weights
from parity.harness import state_of
from parity.harness import to_numpy
from workers import sharded_models as models
from workers.sharded_models import CLASSES
from workers.sharded_models import IMAGES
from workers.sharded_models import NEXT
from workers.sharded_models import NUMBERS
from workers.sharded_models import OPTIMIZERS
from workers.sharded_models import WIDTH
from workers.sharded_models import WORDS
from workers.sharded_models import all_of
from workers.sharded_models import compiled
from workers.sharded_models import compiled_again
from workers.sharded_models import dense
from workers.sharded_models import frozen

QUIET = {"shuffle": False, "verbose": 0}


def trained(make, x, y, scope, optimizer):
    return all_of(compiled(make, scope, optimizer), x, y)


def trained_in(policy, program, scope, optimizer):
    """Layers compute in another dtype, on variables in float32."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        return program(scope, optimizer)
    finally:
        keras.config.set_dtype_policy(before)


def train_on_single_rows(scope, optimizer):
    """One worker has no rows in any batch."""
    model = compiled(models.convolutions, scope, optimizer)
    return all_of(model, IMAGES[:4], CLASSES[:4], batch_size=1)


def toggled(make, is_adopted, scope, optimizer):
    """Layers are frozen and thawed between calls of `fit`, or at first."""
    made_in = contextlib.nullcontext if is_adopted else scope
    model = compiled(make, made_in, optimizer)
    if is_adopted:
        _distribute(model, scope)
    first, second = model.get_layer("first"), model.get_layer("second")
    found = {}
    for step, (layer, trains) in enumerate(
        [(first, False), (second, False), (first, True)]
    ):
        layer.trainable = trains
        with scope():
            compiled_again(model, optimizer)
        logs = model.fit(NUMBERS, CLASSES, 5, epochs=2, **QUIET).history
        found[f"losses/{step}"] = to_numpy(logs["loss"])
    return found | state_of(model)


def set_and_get(scope, optimizer):
    """Weights are read, set, assigned and trained on."""
    model = compiled(dense, scope, optimizer)
    found = all_of(model, NUMBERS, CLASSES)
    weights = model.get_weights()
    model.set_weights([0.5 * value for value in weights])
    kernel = model.get_layer("first").kernel
    kernel.assign_add(ops.ones(kernel.shape))
    kernel.assign(kernel * 0.5)
    found["kernel"] = kernel.numpy()
    found["sum"] = to_numpy(ops.sum(kernel))
    found |= {f"got/{i}": to_numpy(each) for i, each in enumerate(weights)}
    again = all_of(model, NUMBERS, CLASSES, epochs=1)
    return found | {f"again/{key}": value for key, value in again.items()}


def share_layers(scope, optimizer):
    """Two models with layers in common are trained in turn."""
    whole = compiled(dense, scope, optimizer)
    with scope():
        head = layers.Dense(4, name="other")
        inside = whole.get_layer("second").output
        other = keras.Model(whole.inputs, head(inside))
        head.kernel.assign(np.full((24, 4), 0.1, "float32"))
        compiled_again(other, optimizer)
    found = {}
    for turn in range(2):
        for index, model in enumerate((whole, other)):
            own = all_of(model, NUMBERS, CLASSES, epochs=1)
            found |= {
                f"{turn}/{index}/{k}": v
                for k, v in own.items()
                if k.startswith(("weights", "history", "predicted"))
            }
    return found


def own_step(cls, scope, optimizer):
    with scope():
        model = cls()
        model.build((None, WIDTH))
        set_initial_weights(model)
        model.compile(OPTIMIZERS[optimizer]())
    history = model.fit(NUMBERS, CLASSES, 5, epochs=3, **QUIET).history
    return flat("history", history) | state_of(model)


def adversaries(cls, scope, optimizer):
    with scope():
        model = cls()
        model.build(None)
        set_initial_weights(model)
        model.compile(OPTIMIZERS[optimizer](), OPTIMIZERS[optimizer]())
    model.fit(NUMBERS, CLASSES, 5, epochs=3, **QUIET)
    if isinstance(model.generator.layers[0].kernel, ShardedVariable):
        # Its first step has made the slots, as it would make the weights.
        slots = [v for v in model.second.variables if len(v.shape) == 2]
        kinds = {type(slot) for slot in slots}
        assert kinds == {ShardedVariable}, kinds
    return state_of(model)


def fail_and_go_on(scope, where):
    """A step fails in the middle; then training goes on."""
    failing = models.Failing(where)
    model = compiled(lambda: dense(failing), scope)
    failed = False
    try:
        model.fit(NUMBERS, CLASSES, 5, epochs=3, **QUIET)
    except Exception as error:
        failed = where in str(error)
    assert failed
    between = {f"between/{k}": v for k, v in state_of(model).items()}
    failing.fails = False
    return between | all_of(model, NUMBERS, CLASSES)


def low_rank(scope, optimizer):
    """Layers get low-rank updates after a first training."""
    model = compiled(dense, scope, optimizer)
    model.fit(NUMBERS, CLASSES, 5, **QUIET)
    with scope():
        for layer in model.layers[:2]:
            layer.enable_lora(4, b_initializer="ones", a_initializer="ones")
        compiled_again(model, optimizer, metrics=["accuracy"])
    return all_of(model, NUMBERS, CLASSES)


def rematerialized(scope, optimizer):
    with keras.RematScope(mode="full"):
        model = compiled(dense, scope, optimizer)
    return all_of(model, NUMBERS, CLASSES)


def built_by_data(scope, optimizer):
    """A model without a shape is built by its first batch."""
    with scope():
        start = keras.initializers.RandomNormal(seed=1)
        model = keras.Sequential(
            [
                layers.Dense(24, "tanh", kernel_initializer=start),
                layers.Dense(4, kernel_initializer=start),
            ]
        )
        compiled_again(model, optimizer)
    return all_of(model, NUMBERS, CLASSES)


def optimizer_each(scope, optimizer):
    with scope():
        model = models.OptimizerEach()
        model.build(None)
        set_initial_weights(model)
        model.compile()
        model.optimizers = [OPTIMIZERS[optimizer]() for _ in range(3)]
    model.fit(NUMBERS, CLASSES, 5, epochs=3, **QUIET)
    return state_of(model)


def own_loop_of_two(scope, optimizer):
    """Two models are trained in turn, and some rows are on no worker."""
    with scope():
        strategy = keras_dist.get_strategy()
        first, second = dense(), dense()
        set_initial_weights(first)
        set_initial_weights(second)
        optimizers = [OPTIMIZERS[optimizer]() for _ in range(2)]

    def loss_of(model, x, y):
        losses = keras.losses.sparse_categorical_crossentropy(
            y, model(x), from_logits=True
        )
        return keras_dist.compute_average_loss(losses)

    def step(x, y):
        # What one model makes of the other's gradient.
        x = ops.convert_to_tensor(x)
        steepest = keras_dist.gradient(lambda x: ops.sum(second(x) ** 2), x)
        x = x + 0.1 * ops.sign(steepest)
        both = [*first.trainable_variables, *second.trainable_variables]
        found = []
        for model, own in zip((first, second), optimizers, strict=True):
            loss, gradients = keras_dist.value_and_grad(
                lambda: loss_of(first, x, y) + 2.0 * loss_of(second, x, y),
                both,
            )
            named = dict(zip(map(id, both), gradients, strict=True))
            trained = model.trainable_variables
            own.apply([named[id(v)] for v in trained], trained)
            found.append(loss)
        return ops.stack(found)

    losses = []
    batches = [(NUMBERS[i : i + 4], CLASSES[i : i + 4]) for i in (0, 4, 8, 12)]
    for batch in strategy.experimental_distribute_dataset(batches):
        each = strategy.run(step, args=batch)
        losses.append(strategy.reduce("SUM", each, axis=None))
    variables = [*first.variables, *second.variables]
    return {"losses": to_numpy(ops.stack(losses))} | {
        f"state/{i}": v.numpy() for i, v in enumerate(variables)
    }


def own_loop(make, x, y, scope, optimizer):
    """Replica functions train a model; `dense` after a `fit`."""
    with scope():
        strategy = keras_dist.get_strategy()
        model = make()
        set_initial_weights(model)
        own = OPTIMIZERS[optimizer]()
        accuracy = keras.metrics.SparseCategoricalAccuracy()
    if make is dense:
        compiled_again(model, "sgd")
        model.fit(x, y, 5, **QUIET)

    def fail():
        model(x)
        raise ValueError("after the forward pass")

    with contextlib.suppress(ValueError):
        strategy.run(fail)

    @keras_dist.function
    def train_step(x, y):
        def loss_fn():
            logits = model(x, training=True)
            accuracy.update_state(y, logits)
            losses = keras.losses.sparse_categorical_crossentropy(
                y, logits, from_logits=True
            )
            losses = ops.mean(ops.reshape(losses, (len(x), -1)), axis=1)
            return keras_dist.compute_average_loss(losses)

        variables = model.trainable_variables
        loss, gradients = keras_dist.value_and_grad(loss_fn, variables)
        own.apply(gradients, variables)
        return loss

    batches = [(x[i : i + 5], y[i : i + 5]) for i in range(0, len(x), 5)]
    losses = []
    for _ in range(2):
        for batch in strategy.experimental_distribute_dataset(batches):
            each = strategy.run(train_step, args=batch)
            losses.append(strategy.reduce("SUM", each, axis=None))
    (batch,) = strategy.experimental_distribute_dataset([x])
    seen = strategy.gather(strategy.run(model, args=(batch,)), axis=0)
    state = [*model.variables, *own.variables]
    return {
        "losses": to_numpy(ops.stack(losses)),
        "accuracy": to_numpy(accuracy.result()),
        "seen": to_numpy(seen),
    } | {f"state/{i}": v.numpy() for i, v in enumerate(state)}


def adopted(scope, optimizer):
    """A model that was made before."""
    model = compiled(dense, contextlib.nullcontext, optimizer)
    model.optimizer.build(model.trainable_variables)
    _distribute(model, scope)
    return all_of(model, NUMBERS, CLASSES)


def _distribute(model, scope):
    with scope():
        strategy = keras_dist.get_strategy()
    if strategy.num_replicas_in_sync > 1:
        strategy.distribute(model)


HALF = "mixed_bfloat16"
# What each program is called with, before its scope and its argument.
TABLE = {
    "train_transformer": (trained, models.transformer, WORDS, NEXT),
    "train_convolutions": (trained, models.convolutions, IMAGES, CLASSES),
    "train_tied": (trained, models.Tied, WORDS, NEXT),
    "train_with_draws": (trained, models.drawing, NUMBERS, CLASSES),
    "in_place": (trained, models.in_place, WORDS, NEXT),
    "constrained": (trained, models.constrained, NUMBERS, CLASSES),
    # A layer reads what another one rounds to bfloat16.
    "half_elsewhere": (trained, models.reads_exactly, NUMBERS, CLASSES),
    "toggle_trainable": (toggled, dense, False),
    "freeze_at_first": (toggled, frozen, False),
    "adopt_frozen": (toggled, frozen, True),
    "own_step": (own_step, models.Parts),
    "own_step_by_functions": (own_step, models.PartsByFunctions),
    "own_step_that_clips": (own_step, models.PartsThatClip),
    "adversaries": (adversaries, models.Adversaries),
    "adversaries_by_functions": (adversaries, models.AdversariesByFunctions),
    "own_loop": (own_loop, models.transformer, WORDS, NEXT),
    "own_loop_after_fit": (own_loop, dense, NUMBERS, CLASSES),
    **{
        fn.__name__: (fn,)
        for fn in (
            *(train_on_single_rows, set_and_get, share_layers, low_rank),
            *(rematerialized, built_by_data, optimizer_each, own_loop_of_two),
            *(adopted, fail_and_go_on),
        )
    },
}
PROGRAMS = {name: functools.partial(*row) for name, row in TABLE.items()}
PROGRAMS |= {
    new: functools.partial(trained_in, HALF, PROGRAMS[name])
    for new, name in (
        ("half", "train_transformer"),
        ("half_toggled", "toggle_trainable"),
    )
}
