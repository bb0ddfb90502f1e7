"""Parsers of the short forms of lists in Slurm's variables."""

import re

from keras_dist.errors import ClusterError

_ONE_HOST = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")
_PARTS = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def expand_hostlist(hostlist: str) -> list[str]:
    """Expands Slurm's short form of a list of hosts.

    Args:
        hostlist: String, such as the value of SLURM_STEP_NODELIST.

    Returns:
        List of strings, the hosts in the same order. Leading zeros of numbers
        and repeated hosts are kept.

    Raises:
        ClusterError: If the string can't be read.

    Example:

    >>> from keras_dist.cluster_resolver import expand_hostlist
    >>> expand_hostlist("n[08-10,12],login1")
    ['n08', 'n09', 'n10', 'n12', 'login1']
    """
    hosts = [match[0] for match in _ONE_HOST.finditer(hostlist)]
    if ",".join(hosts) != hostlist or not hosts:
        raise _unreadable(hostlist)
    return [name for host in hosts for name in _names(host, hostlist)]


def expand_tasks_per_node(tasks_per_node: str) -> list[int]:
    """Expands Slurm's short form of the numbers of tasks on each node.

    Args:
        tasks_per_node: String, such as the value of
            SLURM_STEP_TASKS_PER_NODE.

    Returns:
        List of integers, one for each node.

    Raises:
        ClusterError: If the string can't be read.

    Example:

    >>> from keras_dist.cluster_resolver import expand_tasks_per_node
    >>> expand_tasks_per_node("3(x2),1")
    [3, 3, 1]
    """
    tasks = []
    for part in tasks_per_node.split(","):
        match = _TASKS.fullmatch(part)
        if not match:
            raise ClusterError(
                "Invalid list of tasks per node. Received: "
                f"{tasks_per_node!r}. Expected: a form such as '3(x2),2,1'."
            )
        tasks += [int(match[1])] * int(match[2] or 1)
    return tasks


def _names(host: str, hostlist: str) -> list[str]:
    names = [""]
    for ranges, text in _PARTS.findall(host):
        ends = [text] if text else _numbers(ranges, hostlist)
        names = [name + end for name in names for end in ends]
    return names


def _numbers(ranges: str, hostlist: str) -> list[str]:
    numbers = []
    for part in ranges.split(","):
        match = _RANGE.fullmatch(part)
        if not match:
            raise _unreadable(hostlist)
        first, last = match[1], match[2] or match[1]
        numbers += [
            str(number).zfill(len(first))
            for number in range(int(first), int(last) + 1)
        ]
    return numbers


def _unreadable(hostlist: str) -> ClusterError:
    return ClusterError(
        f"Invalid list of hosts. Received: {hostlist!r}. Expected: a form such "
        "as 'n[1-2],m5'."
    )
