"""Programs that train one way under a strategy and one way in plain Keras.

Each takes the scope in which it makes its models, and returns what it computed
as a dict of arrays.
"""

import contextlib

import keras
import numpy as np
from keras import layers
from keras import ops

import keras_dist
from parity.harness import flat
from parity.harness import set_initial_weights
from parity.harness import state_of
from parity.harness import to_numpy

ROWS, TOKENS, LENGTH, WIDTH = 13, 11, 6, 16
RNG = np.random.default_rng(0)
WORDS = RNG.integers(0, TOKENS, (ROWS, LENGTH)).astype("int32")
NEXT = RNG.integers(0, TOKENS, (ROWS, LENGTH)).astype("int32")
IMAGES = RNG.normal(size=(ROWS, 6, 6, 3)).astype("float32")
NUMBERS = RNG.normal(size=(ROWS, WIDTH)).astype("float32")
CLASSES = RNG.integers(0, 4, (ROWS,)).astype("int32")

OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(0.01),
    "adamw": lambda: keras.optimizers.AdamW(
        0.01, weight_decay=0.02, global_clipnorm=0.3, use_ema=True
    ),
    "ema_overwrites": lambda: keras.optimizers.Adam(
        0.01, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=2
    ),
    "sgd": lambda: keras.optimizers.SGD(0.05, momentum=0.9, clipnorm=0.2),
    "accumulates": lambda: keras.optimizers.Adam(
        0.01, gradient_accumulation_steps=2
    ),
    "scales_loss": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.01), initial_scale=64.0
    ),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.01, centered=True),
    "adagrad": lambda: keras.optimizers.Adagrad(0.05),
    "adadelta": lambda: keras.optimizers.Adadelta(0.5),
    "adamax": lambda: keras.optimizers.Adamax(0.01),
    "nadam": lambda: keras.optimizers.Nadam(0.01, clipvalue=0.02),
    "ftrl": lambda: keras.optimizers.Ftrl(0.05),
    "lion": lambda: keras.optimizers.Lion(0.002),
    "lamb": lambda: keras.optimizers.Lamb(0.01),
    "adafactor": lambda: keras.optimizers.Adafactor(0.01),
    "muon": lambda: keras.optimizers.Muon(0.01),
    "schedule_free": lambda: keras.optimizers.ScheduleFreeAdamW(0.01),
}


class Positions(layers.Layer):
    """Adds a vector for each position, a variable of its own."""

    def build(self, shape):
        self.table = self.add_weight(shape=shape[1:], name="table")

    def call(self, x):
        return x + self.table


class Block(layers.Layer):
    """One block of a transformer."""

    def __init__(self, **options):
        super().__init__(**options)
        self.before = layers.LayerNormalization()
        self.attention = layers.MultiHeadAttention(
            2, WIDTH // 2, use_bias=False
        )
        self.after = layers.LayerNormalization()
        self.up = layers.Dense(2 * WIDTH, activation="gelu")
        self.down = layers.Dense(WIDTH)

    def build(self, shape):
        self.before.build(shape)
        self.attention.build(shape, shape)
        self.after.build(shape)
        self.up.build(shape)
        self.down.build((*shape[:-1], 2 * WIDTH))

    def call(self, x):
        normal = self.before(x)
        x = x + self.attention(normal, normal, use_causal_mask=True)
        return x + self.down(self.up(self.after(x)))


def transformer():
    words = keras.Input((LENGTH,), dtype="int32")
    x = Positions()(layers.Embedding(TOKENS, WIDTH)(words))
    x = Block()(Block()(x))
    return keras.Model(words, layers.Dense(TOKENS)(x))


def convolutions():
    images = keras.Input((6, 6, 3))
    x = layers.Conv2D(8, 3, use_bias=False)(images)
    x = layers.ReLU()(layers.BatchNormalization()(x))
    x = layers.Conv2D(8, 3, use_bias=False)(x)
    x = layers.Flatten()(layers.BatchNormalization()(x))
    return keras.Model(images, layers.Dense(4)(x))


def dense():
    return keras.Sequential(
        [
            keras.Input((WIDTH,)),
            layers.Dense(24, activation="tanh", name="first"),
            layers.Dense(24, activation="tanh", name="second"),
            layers.Dense(4, name="last"),
        ]
    )


class Tied(keras.Model):
    """Reads the table of its embedding outside of that layer's call."""

    def __init__(self, **options):
        super().__init__(**options)
        self.embedding = layers.Embedding(TOKENS, WIDTH)
        self.gru = layers.GRU(WIDTH, return_sequences=True)
        self.scale = self.add_weight(shape=(TOKENS, LENGTH), name="scale")

    def build(self, shape):
        self.embedding.build(shape)
        self.gru.build((*shape, WIDTH))

    def call(self, words):
        x = self.gru(self.embedding(words))
        table = ops.transpose(self.embedding.embeddings)
        return ops.matmul(x, table) + ops.transpose(self.scale)


def compiled(make, scope, optimizer="adam", loss=None):
    """A model with initial weights that are the same each time."""
    with scope or contextlib.nullcontext():
        model = make()
        if not model.built:
            model.build((None, LENGTH))
        set_initial_weights(model)
        loss = loss or keras.losses.SparseCategoricalCrossentropy(True)
        model.compile(OPTIMIZERS[optimizer](), loss, metrics=["accuracy"])
    return model


def all_of(model, x, y, batch_size=5, **options):
    """What training leaves, and what the model says then."""
    options = {"epochs": 2, "shuffle": False, "verbose": 0, **options}
    history = model.fit(x, y, batch_size=batch_size, **options).history
    seen = model.evaluate(x, y, batch_size, verbose=0, return_dict=True)
    found = flat("history", history) | flat("evaluated", seen)
    found["predicted"] = to_numpy(model.predict(x, batch_size, verbose=0))
    return found | state_of(model)


def train_transformer(scope, optimizer):
    return all_of(compiled(transformer, scope, optimizer), WORDS, NEXT)


def train_convolutions(scope, optimizer):
    return all_of(compiled(convolutions, scope, optimizer), IMAGES, CLASSES)


def train_tied(scope, optimizer):
    return all_of(compiled(Tied, scope, optimizer), WORDS, NEXT)


def train_on_single_rows(scope, optimizer):
    """One worker has no rows in any batch."""
    model = compiled(convolutions, scope, optimizer)
    return all_of(model, IMAGES[:4], CLASSES[:4], batch_size=1)


def toggle_trainable(scope, optimizer):
    """Layers are frozen and thawed between calls of `fit`, and within one."""
    model = compiled(dense, scope, optimizer)
    first, second = model.get_layer("first"), model.get_layer("second")
    found = {}
    for step, (layer, trains) in enumerate(
        [(first, False), (second, False), (first, True)]
    ):
        layer.trainable = trains
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        with scope or contextlib.nullcontext():
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
    with scope or contextlib.nullcontext():
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


class Parts(keras.Model):
    """Calls its layers in its own step, never itself."""

    def __init__(self):
        super().__init__()
        self.encoder = layers.Dense(24, activation="tanh")
        self.decoder = dense()
        self.loss_tracker = keras.metrics.Mean(name="loss")

    def build(self, shape):
        self.encoder.build((None, WIDTH))
        self.built = True

    def call(self, x):
        return self.encoder(x)

    def train_step(self, data):
        x, _ = data
        self.zero_grad()
        encoded = self.encoder(x)
        decoded = self.decoder(encoded[:, :WIDTH])
        error = ops.mean(ops.square(decoded - x[:, :4]), axis=-1)
        loss = ops.mean(error)
        loss.backward()
        weights = self.trainable_weights
        self.optimizer.apply([w.value.grad for w in weights], weights)
        self.loss_tracker.update_state(error)
        return {"loss": self.loss_tracker.result()}


def own_step(scope, optimizer):
    with scope or contextlib.nullcontext():
        model = Parts()
        model.build((None, WIDTH))
        set_initial_weights(model)
        model.compile(OPTIMIZERS[optimizer]())
    history = model.fit(
        NUMBERS, CLASSES, batch_size=5, epochs=3, shuffle=False, verbose=0
    ).history
    return flat("history", history) | state_of(model)


class Adversaries(keras.Model):
    """A generator and a discriminator, with an optimizer each."""

    def __init__(self):
        super().__init__()
        self.generator = dense()
        self.discriminator = keras.Sequential(
            [keras.Input((4,)), layers.Dense(32, "tanh"), layers.Dense(1)]
        )
        self.mean = keras.metrics.Mean(name="loss")

    def compile(self, first, second):
        super().compile()
        self.first, self.second = first, second

    def build(self, shape):
        self.built = True

    def train_step(self, data):
        x, _ = data
        fake = self.generator(x)
        judged = self.discriminator(fake.detach())
        real = self.discriminator(x[:, :4])
        loss = ops.mean(ops.softplus(judged) + ops.softplus(-real))
        self._update(loss, self.first, self.discriminator)
        loss = ops.mean(ops.softplus(-self.discriminator(self.generator(x))))
        self._update(loss, self.second, self.generator)
        self.mean.update_state(loss, x.shape[0])
        return {"loss": self.mean.result()}

    def _update(self, loss, optimizer, part):
        self.zero_grad()
        loss.backward()
        weights = part.trainable_weights
        optimizer.apply([w.value.grad for w in weights], weights)


def adversaries(scope, optimizer):
    with scope or contextlib.nullcontext():
        model = Adversaries()
        model.build(None)
        set_initial_weights(model)
        model.compile(OPTIMIZERS[optimizer](), OPTIMIZERS[optimizer]())
    model.fit(NUMBERS, CLASSES, 5, epochs=3, shuffle=False, verbose=0)
    return state_of(model)


PROGRAMS = {
    fn.__name__: fn
    for fn in (
        train_transformer,
        train_convolutions,
        train_tied,
        train_on_single_rows,
        toggle_trainable,
        set_and_get,
        share_layers,
        own_step,
        adversaries,
    )
}


def wide():
    return keras.Sequential(
        [
            keras.Input((WIDTH,)),
            layers.Dense(512, "tanh"),
            layers.Dense(512, "tanh"),
            layers.Dense(512, "tanh"),
            layers.Dense(4),
        ]
    )


class Failing(layers.Layer):
    """Raises in its third call, forward or backward."""

    def __init__(self, where, **options):
        super().__init__(**options)
        self.where, self.calls, self.fails = where, 0, True

    def call(self, x):
        self.calls += 1
        if self.fails and self.calls >= 3 and keras.ops.is_tensor(x):
            if self.where == "forward":
                raise ValueError("forward")
            if x.requires_grad:
                x = x * 1.0
                x.register_hook(self._raise)
        return x

    def _raise(self, gradient):
        if self.fails:
            raise ValueError("backward")


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


class InPlace(layers.Layer):
    """Changes the results of layers in place, one of which is a view."""

    def __init__(self, **options):
        super().__init__(**options)
        self.first = layers.EinsumDense("abc,cde->abde", (None, 2, WIDTH))
        self.second = layers.Dense(WIDTH)

    def build(self, shape):
        self.first.build(shape)
        self.second.build((*shape[:-1], 2, WIDTH))

    def call(self, x):
        y = self.first(x)
        y += 1.0
        y = self.second(y)
        y *= 2.0
        return keras.ops.sum(y, axis=2) + x


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
    with scope or contextlib.nullcontext():
        for layer in model.layers[:2]:
            layer.enable_lora(4, b_initializer="ones", a_initializer="ones")
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(OPTIMIZERS[optimizer](), loss)
    return all_of(model, NUMBERS, CLASSES)


def half(scope, optimizer):
    """Layers compute in bfloat16, on variables in float32."""
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        model = compiled(transformer, scope, optimizer)
    finally:
        keras.config.set_dtype_policy(policy)
    return all_of(model, WORDS, NEXT)


def rematerialized(scope, optimizer):
    with keras.RematScope(mode="full"):
        model = compiled(dense, scope, optimizer)
    return all_of(model, NUMBERS, CLASSES)


def built_by_data(scope, optimizer):
    """A model without a shape is built by its first batch."""
    with scope or contextlib.nullcontext():
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


PROGRAMS |= {
    fn.__name__: fn
    for fn in (
        fail_and_go_on,
        in_place,
        low_rank,
        half,
        rematerialized,
        built_by_data,
        constrained,
    )
}


class OptimizerEach(keras.Model):
    """One backward pass, then an optimizer for each layer in turn."""

    def __init__(self):
        super().__init__()
        self.inner = dense()
        self.optimizers = []

    def build(self, shape):
        self.built = True

    def call(self, x):
        return self.inner(x)

    def train_step(self, data):
        x, y = data
        loss = keras.losses.SparseCategoricalCrossentropy(True)(y, self(x))
        self.zero_grad()
        loss.backward()
        for layer, optimizer in zip(
            self.inner.layers, self.optimizers, strict=True
        ):
            weights = layer.trainable_weights
            optimizer.apply([w.value.grad for w in weights], weights)
        return {"loss": loss}


def optimizer_each(scope, optimizer):
    with scope or contextlib.nullcontext():
        model = OptimizerEach()
        model.build(None)
        set_initial_weights(model)
        model.compile()
        model.optimizers = [OPTIMIZERS[optimizer]() for _ in range(3)]
    model.fit(NUMBERS, CLASSES, 5, epochs=3, shuffle=False, verbose=0)
    return state_of(model)


def adopted(scope, optimizer):
    """A model that was made and trained before."""
    model = compiled(dense, None, optimizer)
    model.fit(NUMBERS, CLASSES, 5, shuffle=False, verbose=0)
    if scope is not None:
        with scope:
            strategy = keras_dist.get_strategy()
        strategy.distribute(model)
    return all_of(model, NUMBERS, CLASSES)


PROGRAMS |= {fn.__name__: fn for fn in (optimizer_each, adopted)}
