"""README's picture: who holds which rows and which variables.

The numbers are those of four virtual CPU devices, and of a small model.
"""

import pathlib

BACKEND = "jax"
PATH = (
    pathlib.Path(__file__)
    .parents[2]
    .joinpath("docs", "pages", "pictures", "who_holds_what.svg")
)
NUM_ROWS = 10
STRATEGIES = {
    "MirroredStrategy()": {},
    'optimizer_state="sharded"': {"optimizer_state": "sharded"},
    'variables="sharded"': {"variables": "sharded"},
}


def draw():
    """Returns the figure."""
    import keras_dist

    keras_dist.set_virtual_devices(4)

    import keras
    import numpy as np
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.7), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=(1, 1.25))
    for part, title in (
        (
            above,
            f"Each replica computes some rows of a batch, here of {NUM_ROWS}",
        ),
        (below, "Each device keeps all variables of a model, or parts of them"),
    ):
        part.suptitle(title, x=0.006, ha="left", weight="bold")
    axes = above.subplots()
    strategy = keras_dist.MirroredStrategy()
    # As `strategy.run` gets them, which is the same on each backend.
    strategy.explain([(np.zeros((NUM_ROWS, 1)),)]).plot(axes)
    axes.set_xlabel("")
    grid = below.subplots(1, len(STRATEGIES), sharey=True)
    for axes, (name, options) in zip(grid, STRATEGIES.items(), strict=True):
        with keras_dist.MirroredStrategy(**options).scope():
            model = keras.Sequential(
                [
                    keras.Input((64,)),
                    keras.layers.Dense(64, use_bias=False),
                    keras.layers.Dense(64, use_bias=False),
                ]
            )
            model.compile("adam", "mse")
            model.optimizer.build(model.trainable_variables)
        keras_dist.summary(model).plot(axes)
        axes.set_title(name, loc="left", family="monospace", size=10)
        axes.set_xlabel("")
        axes.set_xticks([])
    handles, labels = grid[0].get_legend_handles_labels()
    below.legend(
        handles, labels, loc="outside lower center", ncols=2, frameon=False
    )
    return figure


def write():
    """Writes the picture; two runs write the same."""
    import matplotlib

    figure = draw()
    PATH.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": PATH.stem}):
        figure.savefig(PATH, facecolor="white", metadata={"Date": None})


if __name__ == "__main__":
    write()
