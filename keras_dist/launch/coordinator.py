"""The backend's service outside of the workers, where it has one.

A backend registers the service as an entry point in the group
`keras_dist.coordinators`, under the backend's name: `module:function`. The
function is called as `function(address, num_workers)`, with `"host:port"` to
listen on, in a process without Keras, and serves until the process is told to
end with SIGTERM. Importing its module must not import Keras either. The
environment variable KERAS_DIST_JOB has the word of this start, as for workers.
"""

import sys
from importlib.metadata import EntryPoint
from importlib.metadata import entry_points

ENTRY_POINT_GROUP = "keras_dist.coordinators"

# `__name__` is another one when this module runs as a program.
MODULE = "keras_dist.launch.coordinator"


def find(backend: str) -> EntryPoint | None:
    """Returns the entry point of a backend's coordinator, or `None`."""
    matches = entry_points(group=ENTRY_POINT_GROUP, name=backend)
    return next(iter(matches), None)


def command(backend: str, address: str, num_workers: int) -> tuple[str, ...]:
    return (
        *(sys.executable, "-P", "-m", MODULE),
        *(backend, address, str(num_workers)),
    )


def main() -> None:
    """Runs the coordinator that the command line names."""
    backend, address, num_workers = sys.argv[1:]
    entry_point = find(backend)
    if entry_point is None:
        sys.exit(f"No coordinator is registered for {backend!r}.")
    entry_point.load()(address, int(num_workers))


if __name__ == "__main__":
    main()
