"""The progress of a command's measurements."""

from collections.abc import Callable
from collections.abc import Mapping
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn
from rich.progress import Progress
from rich.progress import TextColumn
from rich.progress import TimeElapsedColumn

T = TypeVar("T")

# A job is given a function to call after each of its rounds.
Job = Callable[[Callable[[], None]], T]


def in_turn(jobs: Mapping[str, Job[T]], rounds: int | None = None) -> list[T]:
    """Does jobs one after another, shows progress, and returns their results.

    Progress goes to standard error: a bar on a terminal, lines elsewhere.
    `rounds` is the number of each job's rounds, or `None` if jobs don't report
    them.
    """
    console = Console(stderr=True, highlight=False)
    done = []
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=16),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        for name, job in jobs.items():
            if not console.is_terminal:
                console.print(f"Measuring {name}", markup=False)
            task = progress.add_task(f"Measuring {name}", total=rounds)
            done.append(job(lambda task=task: progress.advance(task)))  # type: ignore[misc]
            progress.remove_task(task)
    return done
