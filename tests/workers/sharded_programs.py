"""Programs that run one way under a strategy and one way in plain Keras.

Each takes a function that opens the scope in which it makes models, and returns
what it computed as a dict of arrays.
"""

import contextlib

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
from workers.sharded_models import CLASSES
from workers.sharded_models import IMAGES
from workers.sharded_models import LENGTH
from workers.sharded_models import NEXT
from workers.sharded_models import NUMBERS
from workers.sharded_models import OPTIMIZERS
from workers.sharded_models import TOKENS
from workers.sharded_models import WIDTH
from workers.sharded_models import WORDS
from workers.sharded_models import Adversaries
from workers.sharded_models import AdversariesByFunctions
from workers.sharded_models import Failing
from workers.sharded_models import InPlace
from workers.sharded_models import OptimizerEach
from workers.sharded_models import Parts
from workers.sharded_models import PartsByFunctions
from workers.sharded_models import PartsThatClip
from workers.sharded_models import Tied
from workers.sharded_models import all_of
from workers.sharded_models import compiled
from workers.sharded_models import convolutions
from workers.sharded_models import dense
from workers.sharded_models import drawing
from workers.sharded_models import frozen
from workers.sharded_models import reads_exactly
from workers.sharded_models import transformer


def train_transformer(scope, optimizer):
    return all_of(compiled(transformer, scope, optimizer), WORDS, NEXT)


def train_convolutions(scope, optimizer):
    return all_of(compiled(convolutions, scope, optimizer), IMAGES, CLASSES)


def train_tied(scope, optimizer):
    return all_of(compiled(Tied, scope, optimizer), WORDS, NEXT)


def train_with_draws(scope, optimizer):
    keras.utils.set_random_seed(5)
    return all_of(compiled(drawing, scope, optimizer), NUMBERS, CLASSES)


def train_on_single_rows(scope, optimizer):
    """One worker has no rows in any batch."""
    model = compiled(convolutions, scope, optimizer)
    return all_of(model, IMAGES[:4], CLASSES[:4], batch_size=1)


def toggle_trainable(scope, optimizer):
    """Layers are frozen and thawed between calls of `fit`, and within one."""
    return _toggled(compiled(dense, scope, optimizer), scope, optimizer)


def freeze_at_first(scope, optimizer):
    """Weights of a model are not trained, and some of them are later."""
    return _toggled(compiled(frozen, scope, optimizer), scope, optimizer)


def adopt_frozen(scope, optimizer):
    """Weights of a model that was made before are not trained at first."""
    model = compiled(frozen, contextlib.nullcontext, optimizer)
    _distribute(model, scope)
    return _toggled(model, scope, optimizer)


def _toggled(model, scope, optimizer):
    first, second = model.get_layer("first"), model.get_layer("second")
    found = {}
    for step, (layer, trains) in enumerate(
        [(first, False), (second, False), (first, True)]
    ):
        layer.trainable = trains
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        with scope():
            model.compile(OPTIMIZERS[optimizer](), loss)
        found[f"losses/{step}"] = to_numpy(
            model.fit(
                NUMBERS, CLASSES, 5, epochs=2, shuffle=False, verbose=0
            ).history["loss"]
        )
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
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        other.compile(OPTIMIZERS[optimizer](), loss)
    found = {}
    for turn in range(2):
        for model in whole, other:
            own = all_of(model, NUMBERS, CLASSES, epochs=1)
            found |= {
                f"{turn}/{model.name}/{k}": v
                for k, v in own.items()
                if k.startswith(("weights", "history", "predicted"))
            }
    names = sorted({key.split("/")[1] for key in found})
    order = {name: f"model{i}" for i, name in enumerate(names)}
    return {
        k.replace(k.split("/")[1], order[k.split("/")[1]]): v
        for k, v in found.items()
    }


def own_step(scope, optimizer, cls=Parts):
    with scope():
        model = cls()
        model.build((None, WIDTH))
        set_initial_weights(model)
        model.compile(OPTIMIZERS[optimizer]())
    history = model.fit(
        NUMBERS, CLASSES, batch_size=5, epochs=3, shuffle=False, verbose=0
    ).history
    return flat("history", history) | state_of(model)


def own_step_by_functions(scope, optimizer):
    return own_step(scope, optimizer, PartsByFunctions)


def own_step_that_clips(scope, optimizer):
    return own_step(scope, optimizer, PartsThatClip)


def adversaries_by_functions(scope, optimizer):
    return adversaries(scope, optimizer, AdversariesByFunctions)


def adversaries(scope, optimizer, cls=Adversaries):
    with scope():
        model = cls()
        model.build(None)
        set_initial_weights(model)
        model.compile(OPTIMIZERS[optimizer](), OPTIMIZERS[optimizer]())
    model.fit(NUMBERS, CLASSES, 5, epochs=3, shuffle=False, verbose=0)
    if isinstance(model.generator.layers[0].kernel, ShardedVariable):
        # Its first step has made the slots, as it would make the weights.
        slots = [v for v in model.second.variables if len(v.shape) == 2]
        kinds = {type(slot) for slot in slots}
        assert kinds == {ShardedVariable}, kinds
    return state_of(model)


def fail_and_go_on(scope, where):
    """A step fails in the middle; then training goes on."""
    failing = Failing(where)

    def make():
        return keras.Sequential(
            [
                keras.Input((WIDTH,)),
                layers.Dense(24, activation="tanh"),
                failing,
                layers.Dense(24, activation="tanh"),
                layers.Dense(4),
            ]
        )

    model = compiled(make, scope)
    failed = False
    try:
        model.fit(NUMBERS, CLASSES, 5, epochs=3, shuffle=False, verbose=0)
    except Exception as error:
        failed = where in str(error)
    assert failed
    between = {f"between/{k}": v for k, v in state_of(model).items()}
    failing.fails = False
    return between | all_of(model, NUMBERS, CLASSES)


def in_place(scope, optimizer):
    def make():
        words = keras.Input((LENGTH,), dtype="int32")
        x = InPlace()(layers.Embedding(TOKENS, WIDTH)(words))
        return keras.Model(words, layers.Dense(TOKENS)(x))

    return all_of(compiled(make, scope, optimizer), WORDS, NEXT)


def low_rank(scope, optimizer):
    """Layers get low-rank updates after a first training."""
    model = compiled(dense, scope, optimizer)
    model.fit(NUMBERS, CLASSES, 5, shuffle=False, verbose=0)
    with scope():
        for layer in model.layers[:2]:
            layer.enable_lora(4, b_initializer="ones", a_initializer="ones")
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(OPTIMIZERS[optimizer](), loss)
    return all_of(model, NUMBERS, CLASSES)


def half(scope, optimizer):
    """Layers compute in bfloat16, on variables in float32."""
    with _computing_in("mixed_bfloat16"):
        return train_transformer(scope, optimizer)


def half_toggled(scope, optimizer):
    """Layers that compute in bfloat16 are frozen and thawed."""
    with _computing_in("mixed_bfloat16"):
        return toggle_trainable(scope, optimizer)


@contextlib.contextmanager
def _computing_in(name):
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(policy)


def half_elsewhere(scope, optimizer):
    """A layer reads what another one rounds to bfloat16."""
    return all_of(compiled(reads_exactly, scope, optimizer), NUMBERS, CLASSES)


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
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(OPTIMIZERS[optimizer](), loss)
    return all_of(model, NUMBERS, CLASSES)


def constrained(scope, optimizer):
    def make():
        return keras.Sequential(
            [
                keras.Input((WIDTH,)),
                layers.Dense(
                    24,
                    kernel_constraint=keras.constraints.MaxNorm(0.5),
                    kernel_regularizer="l2",
                    activity_regularizer="l1",
                ),
                layers.Dense(
                    24,
                    kernel_constraint=keras.constraints.UnitNorm(axis=1),
                    kernel_regularizer=keras.regularizers.L1L2(0.01, 0.01),
                ),
                layers.Dense(4, kernel_constraint="non_neg"),
            ]
        )

    return all_of(compiled(make, scope, optimizer), NUMBERS, CLASSES)


def optimizer_each(scope, optimizer):
    with scope():
        model = OptimizerEach()
        model.build(None)
        set_initial_weights(model)
        model.compile()
        model.optimizers = [OPTIMIZERS[optimizer]() for _ in range(3)]
    model.fit(NUMBERS, CLASSES, 5, epochs=3, shuffle=False, verbose=0)
    return state_of(model)


def own_loop(scope, optimizer):
    """Replica functions train a model that no `fit` has seen."""
    return _loop(transformer, scope, optimizer, WORDS, NEXT)


def own_loop_after_fit(scope, optimizer):
    return _loop(dense, scope, optimizer, NUMBERS, CLASSES, fits=True)


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


def _loop(make, scope, optimizer, x, y, fits=False):
    with scope():
        strategy = keras_dist.get_strategy()
        model = make()
        set_initial_weights(model)
        own = OPTIMIZERS[optimizer]()
        accuracy = keras.metrics.SparseCategoricalAccuracy()
    if fits:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss)
        model.fit(x, y, 5, shuffle=False, verbose=0)

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


PROGRAMS = {
    fn.__name__: fn
    for fn in (
        train_transformer,
        train_convolutions,
        train_tied,
        train_with_draws,
        train_on_single_rows,
        toggle_trainable,
        freeze_at_first,
        adopt_frozen,
        set_and_get,
        share_layers,
        own_step,
        own_step_by_functions,
        own_step_that_clips,
        adversaries,
        adversaries_by_functions,
        fail_and_go_on,
        in_place,
        low_rank,
        half,
        half_elsewhere,
        half_toggled,
        rematerialized,
        built_by_data,
        constrained,
        optimizer_each,
        own_loop,
        own_loop_after_fit,
        own_loop_of_two,
        adopted,
    )
}
