"""The backend's service outside of the workers, where it has one.

A backend registers it as an entry point in the group
`keras_dist.coordinators`, under its name: `module:function`. The function is
called as `function(address, num_workers)`, with `"host:port"` to listen on, in
a process without Keras, and serves until the process is told to end with
SIGTERM. Importing its module must not import Keras either.
"""

import sys
from importlib.metadata import EntryPoint
from importlib.metadata import entry_points

ENTRY_POINT_GROUP = "keras_dist.coordinators"

# Run as a program, this module has another name.
MODULE = "keras_dist_cli.launcher.coordinator"


def find(backend: str) -> EntryPoint | None:
    """The coordinator of a backend, or `None`."""
    found = entry_points(group=ENTRY_POINT_GROUP, name=backend)
    return next(iter(found), None)


def command(backend: str, address: str, num_workers: int) -> tuple[str, ...]:
    """What to start for it."""
    return (
        *(sys.executable, "-P", "-m", MODULE),
        *(backend, address, str(num_workers)),
    )


def main() -> None:
    """Serves."""
    backend, address, num_workers = sys.argv[1:]
    found = find(backend)
    if found is None:
        sys.exit(f"No coordinator is registered for {backend!r}.")
    found.load()(address, int(num_workers))


if __name__ == "__main__":
    main()
