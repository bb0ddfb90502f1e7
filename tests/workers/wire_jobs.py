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
    for _ in range(3):
        model.train_on_batch(x, x)
    before = loopback_bytes()
    for _ in range(STEPS):
        loss = model.train_on_batch(x, x)
    float(np.asarray(loss if np.ndim(loss) == 0 else loss[0]))
    np.asarray(model.get_weights()[0])
    return 1024 * 1024 * 4, (loopback_bytes() - before) / STEPS


def main(workers, dtype, state):
    """Prints, as JSON, what the chief counted."""
    loopback_up()
    import keras_dist

    found = keras_dist.launch(
        bytes_a_step,
        (dtype or None, state),
        workers=workers,
        devices=1,
        timeout=120,
    )
    print(json.dumps(found[0]))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
