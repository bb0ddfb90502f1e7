"""Functions that workers run, each in a process of its own."""

import keras_dist
from gpu import numbers


def fit(kind, implementation="AUTO", optimizer_state="mirrored"):
    """Trains as a worker.

    Returns:
        The model's values and history, and the devices that computed.
    """
    strategy = keras_dist.MultiWorkerMirroredStrategy(
        communication_options=keras_dist.CommunicationOptions(
            implementation=implementation
        ),
        optimizer_state=optimizer_state,
    )
    state = numbers.state_of(*numbers.trained(strategy, kind))
    return state, [str(device) for device in strategy.plan.devices]


def sharded():
    """Makes a strategy that keeps variables in parts."""
    keras_dist.MultiWorkerMirroredStrategy(variables="sharded")
