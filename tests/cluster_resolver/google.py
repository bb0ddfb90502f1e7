"""Stand-ins for services of Google's API client."""

from types import SimpleNamespace


def tpu_service(**nodes):
    """A TPU service that knows nodes of project `project` in zone `zone`.

    Args:
        **nodes: Google's answers by name.
    """

    def execute(name):
        return nodes[
            name.removeprefix("projects/project/locations/zone/nodes/")
        ]

    found = SimpleNamespace(
        get=lambda name: SimpleNamespace(execute=lambda: execute(name))
    )
    locations = SimpleNamespace(nodes=lambda: found)
    projects = SimpleNamespace(locations=lambda: locations)
    return SimpleNamespace(projects=lambda: projects)
