"""What travels between workers, measured on a loopback of their own."""

import fcntl
import json
import socket
import struct
import sys

STEPS = 8
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1


def loopback_up():
    """Starts the loopback of a network namespace that was just made."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("16sH14x", b"lo", 0)
        answer = fcntl.ioctl(probe, _SIOCGIFFLAGS, request)
        (flags,) = struct.unpack_from("H", answer, 16)
        up = struct.pack("16sH14x", b"lo", flags | _IFF_UP)
        fcntl.ioctl(probe, _SIOCSIFFLAGS, up)


def loopback_bytes():
    """Bytes that have arrived on the loopback so far."""
    with open("/proc/net/dev") as lines:
        for line in lines:
            name, _, counts = line.partition(":")
            if name.strip() == "lo":
                return int(counts.split()[0])
    raise OSError("there is no loopback")


def _bytes_at_rest(strategy):
    """The chief's look at the loopback, while no worker is in a step."""
    # The first one: all workers have ended their steps. The second one: none
    # begins another step before the chief has looked.
    strategy.reduce("SUM", 1.0, axis=None)
    count = loopback_bytes()
    strategy.reduce("SUM", 1.0, axis=None)
    return count


def bytes_a_step(dtype, state):
    """Trains a model of 4 MiB, with all its rows; gradient and wire bytes."""
    import keras
    import numpy as np

    import keras_dist

    options = keras_dist.experimental.CommunicationOptions(dtype=dtype)
    strategy = keras_dist.MultiWorkerMirroredStrategy(
        communication_options=options, optimizer_state=state
    )
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((1024,)), keras.layers.Dense(1024, use_bias=False)]
        )
        model.compile("adam", "mse")
    x = np.ones((6, 1024), "float32")
    # PyTorch's workers expect another sum, until they know how many come.
    for _ in range(STEPS):
        model.train_on_batch(x, x)
    before = _bytes_at_rest(strategy)
    for _ in range(STEPS):
        model.train_on_batch(x, x)
    return 1024 * 1024 * 4, (_bytes_at_rest(strategy) - before) / STEPS


def bytes_of(dtype, states):
    """What `bytes_a_step` gives for each state, one after the other."""
    return [bytes_a_step(dtype or None, state) for state in states]


def main(workers, dtype, states):
    """Prints, as JSON, what the chief counted."""
    loopback_up()
    import keras_dist

    found = keras_dist.launch(
        bytes_of,
        (dtype, states),
        workers=workers,
        devices=1,
        timeout=400,
    )
    print(json.dumps(found[0]))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
