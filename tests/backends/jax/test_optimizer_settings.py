"""What users may change of an optimizer that is built."""

import keras
import numpy as np

from keras_dist_jax.sharding.supported import rate_now
from keras_dist_jax.sharding.supported import settings_of
from keras_dist_jax.sharding.supported import settings_text
from keras_versions import excludes_when_built


def built(optimizer):
    v = keras.Variable(np.ones(3, "float32"), name="v")
    optimizer.build([v])
    return optimizer, [v]


def test_numbers_and_collections_of_them_are_settings():
    optimizer, _ = built(keras.optimizers.Adam())
    given = {
        "beta_1": np.float32(0.5),
        "betas": [0.1, (2, None)],
        "_pair": (5.0, "text"),
        "by_name": {"v": 0.25},
    }
    vars(optimizer).update(given)
    found = settings_of(optimizer)
    assert {name: found[name] for name in given} == given


def test_variables_and_notes_of_keras_are_none():
    optimizer, _ = built(keras.optimizers.SGD(momentum=0.9))
    vars(optimizer)["mixed"] = [1.0, keras.Variable(1.0)]
    found = settings_of(optimizer)
    assert "momentum" in found
    assert not {
        "momentums",
        "mixed",
        "name",
        "built",
        "_variables",
        "_trainable_variables_indices",
    } & set(found)


@excludes_when_built
def test_the_text_changes_with_a_setting_and_with_what_decays():
    optimizer, variables = built(keras.optimizers.AdamW())
    texts = [settings_text(optimizer, variables)]
    assert settings_text(optimizer, variables) == texts[0]
    optimizer.beta_2 = np.float64(0.5)
    texts.append(settings_text(optimizer, variables))
    optimizer.exclude_from_weight_decay(var_names=["v"])
    texts.append(settings_text(optimizer, variables))
    assert len(set(texts)) == 3


def test_a_rate_that_is_a_function_is_asked():
    rates = iter([0.5, 0.25])
    optimizer, _ = built(keras.optimizers.SGD(lambda: next(rates)))
    assert [float(rate_now(optimizer)) for _ in range(2)] == [0.5, 0.25]
    assert rate_now(built(keras.optimizers.SGD(0.1))[0]) is None
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    assert rate_now(built(scaled)[0]) is None
