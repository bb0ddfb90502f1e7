"""The native loops of `keras-dist bench loops` on PyTorch."""

import itertools
from collections.abc import Sequence
from typing import Any

import keras
import torch

from keras_dist.bench.loops import BETA_1
from keras_dist.bench.loops import BETA_2
from keras_dist.bench.loops import EPSILON
from keras_dist.bench.loops import LEARNING_RATE
from keras_dist.bench.loops import Loop
from keras_dist.bench.loops import Setting
from keras_dist.bench.portable import build_model


class NativeLoop(Loop):
    """An eager loop of torch.nn and torch.optim, without Keras."""

    def __init__(self, setting: Setting) -> None:
        device = _device(setting)
        self._model = _sequential(setting).to(device)
        self._optimizer = torch.optim.Adam(
            self._model.parameters(),
            lr=LEARNING_RATE,
            betas=(BETA_1, BETA_2),
            eps=EPSILON,
        )
        self._batches = _placed(setting, device)

    def run(self, steps: int) -> float:
        model, optimizer = self._model, self._optimizer
        for x, y in itertools.islice(itertools.cycle(self._batches), steps):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        return float(loss.detach())


class KerasLoop(Loop):
    """An eager loop around a Keras model and optimizer."""

    def __init__(self, setting: Setting) -> None:
        device = _device(setting)
        with keras.device(str(device)):
            self._model = build_model(setting)
            self._optimizer = keras.optimizers.Adam(LEARNING_RATE)
            self._optimizer.build(self._model.trainable_variables)
        self._batches = _placed(setting, device)

    def run(self, steps: int) -> float:
        model, optimizer = self._model, self._optimizer
        variables = model.trainable_variables
        for x, y in itertools.islice(itertools.cycle(self._batches), steps):
            model.zero_grad()
            losses = keras.losses.sparse_categorical_crossentropy(
                y, model(x, training=True), from_logits=True
            )
            loss = losses.mean()
            loss.backward()
            with torch.no_grad():
                optimizer.apply([v.value.grad for v in variables], variables)
        return float(loss.detach())


def _sequential(setting: Setting) -> torch.nn.Sequential:
    layers: list[torch.nn.Module] = []
    weights = setting.weights()
    for kernel, bias in zip(weights[::2], weights[1::2], strict=True):
        layer = torch.nn.Linear(*kernel.shape)
        with torch.no_grad():
            layer.weight.copy_(torch.from_numpy(kernel.T))
            layer.bias.copy_(torch.from_numpy(bias))
        layers += [layer, torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1])


def _device(setting: Setting) -> torch.device:
    kind, _, index = setting.devices[0].partition(":")
    return torch.device("cpu" if kind == "cpu" else f"cuda:{index}")


def _placed(
    setting: Setting, device: torch.device
) -> Sequence[tuple[Any, Any]]:
    return [
        (
            torch.from_numpy(x).to(device),
            # PyTorch's cross entropy takes no int32 labels.
            torch.from_numpy(y).to(device, torch.int64),
        )
        for x, y in setting.batches()
    ]
