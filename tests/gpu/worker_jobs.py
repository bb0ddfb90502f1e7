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


def fit_sharded(kind):
    """Trains as a worker that keeps a part of the variables.

    Returns:
        The model's whole weights and history, and the devices that computed.
    """
    strategy = keras_dist.MultiWorkerMirroredStrategy(variables="sharded")
    state = numbers.weights_of(*numbers.trained(strategy, kind))
    return state, [str(device) for device in strategy.plan.devices]
