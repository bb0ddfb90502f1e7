"""Models, data and optimizers for variables in parts."""

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
    "clips": lambda: Clips(0.05, momentum=0.9),
    "adds_up": lambda: AddsUp(0.05),
}


class Clips(keras.optimizers.SGD):
    """Clips by a number of Python, and keeps it."""

    norm = 0.0

    def apply(self, grads, trainable_variables=None):
        squares = [float(ops.sum(ops.square(g))) for g in grads]
        self.norm = sum(squares) ** 0.5
        scale = min(1.0, 0.2 / self.norm)
        super().apply([g * scale for g in grads], trainable_variables)


class AddsUp(keras.optimizers.Optimizer):
    """Uses sums along an axis, a mean of Python and an array of NumPy."""

    def update_step(self, gradient, variable, learning_rate):
        total = ops.cumsum(gradient, axis=-1) + ops.mean(gradient).item()
        largest = np.abs(ops.convert_to_numpy(variable)).max()
        step = ops.cast(learning_rate, variable.dtype) * total
        self.assign_sub(variable, step / (1.0 + largest))


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


class Tables(layers.Layer):
    """Has weights that nobody trains: one is fixed, one follows the data."""

    def build(self, shape):
        size = (WIDTH, WIDTH)
        self.fixed = self.add_weight(shape=size, name="fixed", trainable=False)
        self.moving = self.add_weight(
            shape=size,
            name="moving",
            trainable=False,
            initializer="zeros",
            aggregation="mean",
        )

    def call(self, x, training=None):
        outputs = x + ops.matmul(x, self.fixed + self.moving)
        if training:
            seen = ops.mean(x[:, :, None] * x[:, None, :], axis=0)
            self.moving.assign(0.9 * self.moving + 0.1 * seen)
        return outputs


def frozen():
    """A model with weights that are not trained."""
    return keras.Sequential(
        [
            keras.Input((WIDTH,)),
            layers.Dense(WIDTH, "tanh", trainable=False, name="first"),
            Tables(name="tables"),
            layers.Dense(WIDTH, "tanh", name="second"),
            layers.BatchNormalization(),
            layers.Dense(4, name="last"),
        ]
    )


class ReadsExactly(layers.Layer):
    """Computes in float32 with the kernel of a layer that does not."""

    def __init__(self, **options):
        super().__init__(**options)
        self.inner = layers.Dense(WIDTH, dtype="mixed_bfloat16")
        self.norm = layers.LayerNormalization(dtype="mixed_bfloat16")

    def build(self, shape):
        self.inner.build(shape)
        self.norm.build(shape)

    def call(self, x):
        rounded = self.norm(self.inner(x))
        exact = ops.matmul(x, self.inner.kernel)
        return exact + 0.0 * ops.cast(rounded, "float32")


def reads_exactly():
    numbers = keras.Input((WIDTH,))
    return keras.Model(numbers, layers.Dense(4)(ReadsExactly()(numbers)))


def convolutions():
    images = keras.Input((6, 6, 3))
    x = layers.Conv2D(8, 3, use_bias=False)(images)
    x = layers.ReLU()(layers.BatchNormalization()(x))
    x = layers.Conv2D(8, 3, use_bias=False)(x)
    x = layers.Flatten()(layers.BatchNormalization()(x))
    return keras.Model(images, layers.Dense(4)(x))


def dense(*middle):
    return keras.Sequential(
        [
            keras.Input((WIDTH,)),
            layers.Dense(24, activation="tanh", name="first"),
            *middle,
            layers.Dense(24, activation="tanh", name="second"),
            layers.Dense(4, name="last"),
        ]
    )


class Noise(layers.Layer):
    """Noise from Keras' own generator."""

    def call(self, x, training=False):
        if not training:
            return x
        return x + 0.1 * keras.random.normal(ops.shape(x))


def drawing():
    gaussian = layers.GaussianNoise(0.1, seed=3)
    return dense(layers.Dropout(0.3), Noise(), gaussian)


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


class PartsThatClip(Parts):
    """Takes a number of Python of a gradient in parts."""

    def train_step(self, data):
        x, _ = data
        self.zero_grad()
        error = ops.mean(ops.square(self(x)), axis=-1)
        ops.mean(error).backward()
        kernel = self.encoder.kernel
        gradient = kernel.value.grad
        norm = float(ops.sum(ops.square(gradient))) ** 0.5
        scale = min(1.0, 0.01 / norm)
        self.optimizer.apply([gradient * scale], [kernel])
        self.loss_tracker.update_state(error)
        return {"loss": self.loss_tracker.result()}


class PartsByFunctions(Parts):
    """Differentiates functions, as the tutorials do."""

    def train_step(self, data):
        x, _ = data
        variables = self.trainable_variables

        def loss_fn():
            encoded = layers.Dropout(0.2, seed=3)(self.encoder(x))
            decoded = self.decoder(encoded[:, :WIDTH])
            error = ops.mean(ops.square(decoded - x[:, :4]), axis=-1)
            return ops.mean(error), error

        (loss, error), gradients = keras_dist.value_and_grad(
            loss_fn, variables, has_aux=True
        )
        self.optimizer.apply(gradients, variables)
        # Of a second loss, for which the first update counts.
        loss = keras_dist.gradient(
            lambda: 0.1 * ops.mean(ops.abs(self(x))), self.encoder.kernel
        )
        self.optimizer.apply([loss], [self.encoder.kernel])
        self.loss_tracker.update_state(error)
        return {"loss": self.loss_tracker.result()}


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

        def of_discriminator():
            judged = self.discriminator(ops.stop_gradient(self.generator(x)))
            real = self.discriminator(x[:, :4])
            return ops.mean(ops.softplus(judged) + ops.softplus(-real))

        def of_generator():
            judged = self.discriminator(self.generator(x))
            return ops.mean(ops.softplus(-judged))

        self.update(of_discriminator, self.first, self.discriminator)
        loss = self.update(of_generator, self.second, self.generator)
        self.mean.update_state(loss, x.shape[0])
        return {"loss": self.mean.result()}

    def update(self, loss, optimizer, part):
        weights = part.trainable_weights
        value, gradients = self.value_and_grad(loss, weights)
        optimizer.apply(gradients, weights)
        return value

    def value_and_grad(self, loss, weights):
        self.zero_grad()
        value = loss()
        value.backward()
        return value, [w.value.grad for w in weights]


class AdversariesByFunctions(Adversaries):
    """Differentiates functions, of one part at a time."""

    def value_and_grad(self, loss, weights):
        gradients = keras_dist.gradient(loss, weights)
        return loss(), gradients


def wide(dtype="float32"):
    hidden = [layers.Dense(512, "tanh", dtype=dtype) for _ in range(3)]
    return keras.Sequential(
        [keras.Input((WIDTH,)), *hidden, layers.Dense(4, dtype=dtype)]
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


def in_place():
    words = keras.Input((LENGTH,), dtype="int32")
    x = InPlace()(layers.Embedding(TOKENS, WIDTH)(words))
    return keras.Model(words, layers.Dense(TOKENS)(x))


def constrained():
    first = layers.Dense(
        24,
        kernel_constraint=keras.constraints.MaxNorm(0.5),
        kernel_regularizer="l2",
        activity_regularizer="l1",
    )
    second = layers.Dense(
        24,
        kernel_constraint=keras.constraints.UnitNorm(axis=1),
        kernel_regularizer=keras.regularizers.L1L2(0.01, 0.01),
    )
    last = layers.Dense(4, kernel_constraint="non_neg")
    return keras.Sequential([keras.Input((WIDTH,)), first, second, last])


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
        loss = cross_entropy()(y, self(x))
        self.zero_grad()
        loss.backward()
        for layer, optimizer in zip(
            self.inner.layers, self.optimizers, strict=True
        ):
            weights = layer.trainable_weights
            optimizer.apply([w.value.grad for w in weights], weights)
        return {"loss": loss}


def cross_entropy():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def compiled(make, scope, optimizer="adam"):
    """A model with initial weights that are the same each time."""
    keras.utils.set_random_seed(5)
    with scope():
        model = make()
        if not model.built:
            model.build((None, LENGTH))
        set_initial_weights(model)
        return compiled_again(model, optimizer, metrics=["accuracy"])


def compiled_again(model, optimizer, **options):
    model.compile(OPTIMIZERS[optimizer](), cross_entropy(), **options)
    return model


def all_of(model, x, y, batch_size=5, **options):
    """What training leaves, and what the model says then."""
    options = {"epochs": 2, "shuffle": False, "verbose": 0, **options}
    history = model.fit(x, y, batch_size=batch_size, **options).history
    seen = model.evaluate(x, y, batch_size, verbose=0, return_dict=True)
    found = flat("history", history) | flat("evaluated", seen)
    found["predicted"] = to_numpy(model.predict(x, batch_size, verbose=0))
    return found | state_of(model)
