"""Stand-ins for services of Google's API client."""

from types import SimpleNamespace


def _request(answer):
    return SimpleNamespace(execute=lambda: answer)


def compute_service(*pages):
    """A compute service with an instance group.

    Args:
        *pages: Dicts from the names of instances to their addresses, or
            `None` for an answer without items.
    """
    addresses = {k: v for page in pages for k, v in (page or {}).items()}
    answers = [
        {}
        if page is None
        else {"items": [{"instance": f"https://x/zones/z/{k}"} for k in page]}
        for page in pages
    ]

    def next_page(previous_request, previous_response):
        index = answers.index(previous_response) + 1
        return _request(answers[index]) if index < len(answers) else None

    def list_instances(project, zone, body, instanceGroup=None, **others):
        assert (project, zone) == ("project", "zone")
        assert body == {"instanceState": "RUNNING"}
        # The original calls it otherwise than Google does.
        assert (instanceGroup or others["instanceGroups"]) == "group"
        return _request(answers[0])

    def get(project, zone, instance):
        interface = {"networkIP": addresses[instance]}
        return _request({"networkInterfaces": [interface]})

    groups = SimpleNamespace(
        listInstances=list_instances, listInstances_next=next_page
    )
    return SimpleNamespace(
        instanceGroups=lambda: groups,
        instances=lambda: SimpleNamespace(get=get),
    )


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
