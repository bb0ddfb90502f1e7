"""A student learns from a teacher: `compute_loss` is overridden."""

import keras
from keras import layers
from keras import ops

from clients.programs.harness import ROWS
from clients.programs.harness import rng


class Distiller(keras.Model):
    def __init__(self, student, teacher):
        super().__init__()
        self.teacher = teacher
        self.student = student

    def compile(
        self,
        optimizer,
        metrics,
        student_loss_fn,
        distillation_loss_fn,
        alpha=0.1,
        temperature=3,
    ):
        super().compile(optimizer=optimizer, metrics=metrics)
        self.student_loss_fn = student_loss_fn
        self.distillation_loss_fn = distillation_loss_fn
        self.alpha = alpha
        self.temperature = temperature

    def compute_loss(
        self,
        x=None,
        y=None,
        y_pred=None,
        sample_weight=None,
        allow_empty=False,
        training=True,
    ):
        teacher_pred = self.teacher(x, training=False)
        student_loss = self.student_loss_fn(y, y_pred)
        distillation_loss = self.distillation_loss_fn(
            ops.softmax(teacher_pred / self.temperature, axis=1),
            ops.softmax(y_pred / self.temperature, axis=1),
        ) * (self.temperature**2)
        return self.alpha * student_loss + (1 - self.alpha) * distillation_loss

    def call(self, x):
        return self.student(x)


def network(units):
    return keras.Sequential(
        [
            keras.Input((5, 5, 1)),
            layers.Conv2D(units, 3, strides=2, padding="same"),
            layers.LeakyReLU(negative_slope=0.2),
            layers.MaxPooling2D(2, strides=1, padding="same"),
            layers.Flatten(),
            layers.Dense(3),
        ]
    )


def make():
    teacher, student = network(4), network(2)
    distiller = Distiller(student=student, teacher=teacher)
    distiller.compile(
        optimizer=keras.optimizers.Adam(0.01),
        metrics=[keras.metrics.SparseCategoricalAccuracy()],
        student_loss_fn=keras.losses.SparseCategoricalCrossentropy(
            from_logits=True
        ),
        distillation_loss_fn=keras.losses.KLDivergence(),
        alpha=0.1,
        temperature=10,
    )
    images = rng().normal(size=(ROWS, 5, 5, 1)).astype("float32")
    return distiller, {"x": images, "y": rng().integers(0, 3, ROWS)}
