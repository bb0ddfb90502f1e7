"""Trains on 2 actors of Ray, without Ray Train."""

import os
import socket

import ray


def free_address():
    """Returns an address of this process' host, with a free port."""
    host = ray.util.get_node_ip_address()
    with socket.create_server((host, 0)) as listener:
        return f"{host}:{listener.getsockname()[1]}"


@ray.remote(num_cpus=1)
class Worker:
    """One worker: a process of its own."""

    def address(self):
        """Returns an address of this worker's host, with a free port."""
        return free_address()

    def train(self, addresses, index, path):
        """Trains together with the workers at the other addresses."""
        os.environ["KERAS_DIST_WORKERS"] = ",".join(addresses)
        os.environ["KERAS_DIST_WORKER_INDEX"] = str(index)
        import digits  # imports Keras: in a worker, not where Ray is started

        return digits.train(path)


def main():
    """Starts Ray and the actors."""
    backend = os.environ.get("KERAS_BACKEND", "jax")
    ray.init(runtime_env={"env_vars": {"KERAS_BACKEND": backend}})
    workers = [Worker.remote() for _ in range(2)]
    addresses = ray.get([worker.address.remote() for worker in workers])
    path = os.path.abspath("digits.keras")
    first, second = ray.get(
        [
            worker.train.remote(addresses, index, path)
            for index, worker in enumerate(workers)
        ]
    )
    assert first == second  # the workers have equal weights


if __name__ == "__main__":
    main()
