"""Loses one of 2 actors of Ray while they train; prints what became of both."""

import os
import pathlib
import signal

import ray
import ray_actors


@ray.remote(num_cpus=1)
class Worker:
    """A worker which, if it is the second one, ends in the third epoch."""

    def address(self):
        """See `ray_actors.Worker`."""
        return ray_actors.free_address()

    def train(self, addresses, index, path):
        """See `ray_actors.Worker`."""
        os.environ["KERAS_DIST_WORKERS"] = ",".join(addresses)
        os.environ["KERAS_DIST_WORKER_INDEX"] = str(index)
        import digits
        import keras

        class Lost(keras.callbacks.Callback):
            def on_epoch_begin(self, epoch, logs=None):
                if epoch == 2 and index == 1:
                    os.kill(os.getpid(), signal.SIGKILL)

        return digits.train(path, [Lost()])


def main():
    """Starts Ray and the actors."""
    backend = os.environ["KERAS_BACKEND"]
    ray.init(runtime_env={"env_vars": {"KERAS_BACKEND": backend}})
    workers = [Worker.remote() for _ in range(2)]
    addresses = ray.get([worker.address.remote() for worker in workers])
    path = str(pathlib.Path("digits.keras").resolve())
    results = [
        worker.train.remote(addresses, index, path)
        for index, worker in enumerate(workers)
    ]
    for index, result in enumerate(results):
        try:
            ray.get(result, timeout=150)
        except ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None)
            print(f"worker {index}: {type(cause or error).__name__}: {cause}")


if __name__ == "__main__":
    main()
