"""`keras-dist explain`: the page about errors, read without the network."""

import difflib
import importlib.resources
import re
from typing import Annotated

import typer
from rich.console import Console
from rich.markdown import Markdown

from keras_dist import errors
from keras_dist.cli.environment import fail
from keras_dist.planning import tables


def explain(
    section: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SECTION]",
            help="A section's title or the end of its address, or the class "
            "of an error, in any case. Without it: list all sections.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Print what the documentation says of an error, without the network.

    The message of an error ends with this command. Ends with 0, or 2 if there
    is no such section.
    """
    console = Console(highlight=False)
    if not section:
        _print_list(console)
        return
    name = " ".join(section)
    titles = titles_by_name()
    title = titles.get(_key(name))
    if title is None:
        fail(_no_section(name, titles))
    text = f"## {title}\n{sections()[title]}".strip()
    if console.is_terminal:
        console.print(Markdown(text))
    else:
        typer.echo(text)
    typer.echo(f"\n{errors.address_of(title)}")


def sections() -> dict[str, str]:
    """Returns the Markdown of each section of the page, by its title."""
    folder = importlib.resources.files("keras_dist").joinpath("pages")
    page = folder.joinpath("errors.md").read_text(encoding="utf-8")
    _, *parts = re.split(r"\n## (.+)\n", page)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def errors_of(title: str) -> list[str]:
    """Returns the names of the errors whose messages name a section."""
    classes = {name: getattr(errors, name) for name in errors.__all__}
    return [
        name
        for name, error_class in classes.items()
        if error_class.section == title
    ]


def titles_by_name() -> dict[str, str]:
    """Returns the title of a section by each key that a user may write."""
    titles = {errors.anchor_of(title): title for title in sections()}
    for title in sections():
        titles |= {name.lower(): title for name in errors_of(title)}
    return titles


def _key(name: str) -> str:
    # A traceback has the whole name of a class.
    name = re.sub(r"^keras_dist\.(errors\.)?", "", name.strip())
    return errors.anchor_of(name)


def _no_section(name: str, titles: dict[str, str]) -> str:
    near = difflib.get_close_matches(_key(name), titles, cutoff=0.5)
    anchors = dict.fromkeys(errors.anchor_of(titles[key]) for key in near)
    meant = f" Did you mean {' or '.join(anchors)}?" if anchors else ""
    return (
        f"the page about errors has no section {name!r}. Expected: the title "
        "of a section, the end of its address, or the class of an error."
        f"{meant} `keras-dist explain` lists all of them."
    )


def _print_list(console: Console) -> None:
    console.print(
        tables.table(
            "Sections of the page about errors",
            ("keras-dist explain ...", tables.WORD),
            ("Errors", tables.WORDS),
            rows=[
                (
                    errors.anchor_of(title),
                    ", ".join(errors_of(title)) or "a warning",
                )
                for title in sections()
            ],
        )
    )
    typer.echo(f"{errors.SITE}errors/")
