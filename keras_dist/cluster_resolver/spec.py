"""ClusterSpec: the addresses of a cluster's tasks, by job."""

from collections.abc import Mapping
from typing import Any

from keras_dist.errors import ClusterError


class ClusterSpec:
    """The tasks of a cluster and their addresses.

    Tasks belong to jobs. A job has a name, such as `"chief"`, `"worker"` or
    `"evaluator"`, and its tasks are numbered from 0.

    Args:
        cluster: Dict from the names of jobs to the addresses of their tasks:
            a list of strings `"host:port"`, or, where some are unknown, a
            dict from task indices to strings. Or another `ClusterSpec`, which
            may be TensorFlow's.

    Raises:
        TypeError: If `cluster` is anything else.
        ClusterError: If a task index is no integer of at least 0.

    Example:

    >>> from keras_dist.cluster_resolver import ClusterSpec
    >>> spec = ClusterSpec({"worker": ["10.0.0.1:9000", "10.0.0.2:9000"]})
    >>> spec.num_tasks("worker"), spec.task_address("worker", 1)
    (2, '10.0.0.2:9000')
    """

    def __init__(self, cluster: object) -> None:
        if not isinstance(cluster, Mapping):
            cluster = _dict_of(cluster)
        self._jobs = {job: _tasks(job, cluster[job]) for job in cluster}

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (ClusterSpec, Mapping)):
            return NotImplemented
        try:
            return self._jobs == ClusterSpec(other)._jobs
        except (ClusterError, TypeError):
            return False

    # Not hashable, like the dicts that it compares equal to.
    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        jobs = dict(sorted(self.as_dict().items()))
        return f"ClusterSpec({jobs!r})"

    def as_dict(self) -> dict[str, Any]:
        """Returns each job's addresses, in a form that `ClusterSpec` accepts.

        Returns:
            Dict from the names of jobs to a list of addresses, or to a dict
            from task indices to addresses if some indices are missing or the
            job has no tasks.
        """
        return {
            job: self.job_tasks(job)
            if tasks and len(tasks) == max(tasks) + 1
            else dict(sorted(tasks.items()))
            for job, tasks in self._jobs.items()
        }

    @property
    def jobs(self) -> list[str]:
        """Names of the jobs."""
        return list(self._jobs)

    def num_tasks(self, job_name: str) -> int:
        """Returns the number of a job's tasks.

        Args:
            job_name: String, the name of the job.

        Raises:
            ClusterError: If there is no such job.
        """
        return len(self._job(job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """Returns the indices of a job's tasks, in order.

        Args:
            job_name: String, the name of the job.

        Raises:
            ClusterError: If there is no such job.
        """
        return sorted(self._job(job_name))

    def task_address(self, job_name: str | None, task_index: object) -> str:
        """Returns the address of a task.

        Args:
            job_name: String, the name of the task's job.
            task_index: Integer, the task's index in its job.

        Raises:
            ClusterError: If there is no such job or task.
        """
        tasks = self._job(job_name)
        if task_index not in tasks:
            raise ClusterError(
                f"No task with index {task_index!r} in job {job_name!r}. "
                f"Expected one of: {sorted(tasks)}."
            )
        return tasks[task_index]

    def job_tasks(self, job_name: str) -> list[str | None]:
        """Returns a job's addresses in the order of task indices.

        Args:
            job_name: String, the name of the job.

        Returns:
            List of strings, with `None` for missing indices.

        Raises:
            ClusterError: If there is no such job.
        """
        tasks = self._job(job_name)
        return [tasks.get(index) for index in range(max(tasks, default=-1) + 1)]

    def _job(self, name: str | None) -> dict[int, str]:
        if name not in self._jobs:
            raise ClusterError(
                f"No such job in cluster: {name!r}. Expected one of: "
                f"{self.jobs}."
            )
        return self._jobs[name]


def _dict_of(spec: object) -> Mapping[str, Any]:
    as_dict = getattr(spec, "as_dict", None)
    if not callable(as_dict):
        raise TypeError(
            "`cluster` must be a ClusterSpec, or a dict from the names of "
            "jobs to tasks. The tasks of a job are a list of addresses, or a "
            f"dict from task indices to addresses. Received: {spec!r} of type "
            f"{type(spec).__name__}."
        )
    jobs: Mapping[str, Any] = as_dict()
    return jobs


def _tasks(job: object, tasks: object) -> dict[int, str]:
    if not isinstance(job, str):
        raise TypeError(f"Job name {job!r} must be a string.")
    if isinstance(tasks, (list, tuple)):
        tasks = dict(enumerate(tasks))
    if not isinstance(tasks, Mapping):
        raise TypeError(
            f"The tasks for job {job!r} must be a list of addresses or a dict "
            f"from task indices to addresses. Received: {tasks!r}."
        )
    checked = {}
    for index, address in tasks.items():
        number = _index(job, index)
        if not isinstance(address, str):
            raise TypeError(
                f"Task address {address!r} of job {job!r} must be a string "
                "'host:port'."
            )
        checked[number] = address
    return checked


def _index(job: str, index: Any) -> int:
    try:
        # JSON's keys are strings.
        number = int(index)
    except (TypeError, ValueError):
        number = -1
    if number < 0:
        raise ClusterError(
            f"A task index of job {job!r} must be an integer of at least 0. "
            f"Received: {index!r}."
        )
    return number
