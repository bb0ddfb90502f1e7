"""Trains on the backend of `KERAS_BACKEND` and writes down the numbers.

python train.py numbers.npz
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import numpy as np
import torch  # noqa: F401 - before tensorflow, or the two don't go together

from parity import kinds
from parity.cases import CASES
from parity.harness import train

CASE_NAMES = (
    "weighted",
    "batch_norm_conv_adam",
    "mask_gru",
    "two_headed",
    "last_of_one",
    "optimizer_adamw",
    "optimizer_accumulation",
    "optimizer_global_clipnorm",
    "loss_mean_with_sample_weight",
    "layer_attention",
)
KIND_NAMES = ("tf_data", "torch_loader", "grain_map")


def numbers():
    for case in CASES:
        if case.name in CASE_NAMES:
            for name, value in train(case, 3).items():
                yield f"case|{case.name}|{name}", value
    for kind in KIND_NAMES:
        for count in (3, None):
            outcome = kinds.outcome_of(kinds.KINDS[kind], count)
            for name, value in outcome.items():
                yield f"kind|{kind}|{count}|{name}", value


if __name__ == "__main__":
    np.savez(sys.argv[1], **dict(numbers()))
