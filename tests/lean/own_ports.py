"""Each of tox's environments draws its workers' ports from its own range.

A port is chosen some seconds before its worker listens there, and those that
run on one machine at once don't see what the others have chosen.
"""

import importlib.machinery
import os

MODULE = "keras_dist.launch.launcher.addresses"
ENVIRONMENTS = (
    "tensorflow",
    "torch",
    "jax",
    "cross",
    "keras314-tensorflow",
    "keras314-torch",
    "keras314-jax",
)


class OwnPorts:
    """A finder that narrows the launcher's ports as it is imported."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        environment = os.environ.get("TOX_ENV_NAME")
        if name != MODULE or environment not in ENVIRONMENTS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        run = spec.loader.exec_module

        def run_and_narrow(module):
            run(module)
            size = len(module._PORTS) // len(ENVIRONMENTS)
            start = ENVIRONMENTS.index(environment) * size
            module._PORTS = module._PORTS[start : start + size]

        spec.loader.exec_module = run_and_narrow
        return spec
