"""Shows how far a command is."""

from collections.abc import Callable
from collections.abc import Mapping
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn
from rich.progress import Progress
from rich.progress import TextColumn
from rich.progress import TimeElapsedColumn

T = TypeVar("T")

# Takes what is to be called after each of its rounds.
Job = Callable[[Callable[[], None]], T]


def in_turn(jobs: Mapping[str, Job[T]], rounds: int | None = None) -> list[T]:
    """Does jobs one after another, and says so on standard error.

    With a bar on a terminal, in lines elsewhere.

    Args:
        jobs: Mapping from what is measured to `Job`.
        rounds: Integer, of each; `None` where they are not told.

    Returns:
        List of what the jobs returned.
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
