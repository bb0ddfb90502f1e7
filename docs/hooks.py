"""Hooks of MkDocs for the site: pages from other folders, and their links.

All pages link to each other by the paths of their files in the repository, so
that the links also work where the files are read without the site. A link to a
file without a page becomes a link to the file in the public repository.
"""

import ast
import posixpath
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File
from mkdocs.structure.files import Files
from nbconvert.exporters import MarkdownExporter

sys.path.insert(0, str(Path(__file__).parent))
from griffe_extension import MODULES
from griffe_extension import short_names
from griffe_extension import with_links

TOP = Path(__file__).parents[1]
FILES = "https://github.com/keras-dist/keras_dist/blob/main"
PAGES = "docs/pages"
# Pages whose files are in other folders, by the path of the page.
ELSEWHERE = {
    "index.md": "README.md",
    "changelog.md": "CHANGELOG.md",
    "errors.md": "keras_dist/pages/errors.md",
    "tutorials/index.md": "tutorials/README.md",
    **{
        f"tutorials/{path.stem}.md": f"tutorials/{path.name}"
        for path in sorted(TOP.glob("tutorials/*.ipynb"))
    },
}
LINK = re.compile(r"\]\((?![a-z]+:|#)([^)\s#]+)(#[^)\s]*)?\)")
TABLE = re.compile(r"<!-- table of (\S+) that begins (\|.*\|) -->")


def public_paths() -> Iterator[str]:
    """Yields the paths of the public names, as `__all__` has them."""
    for module in MODULES:
        path = TOP.joinpath(*module.split("."))
        # A stub comes before the module that loads what it lists.
        stub, package = path / "__init__.pyi", path / "__init__.py"
        files = (stub, package, path.with_suffix(".py"))
        file = next(each for each in files if each.exists())
        for node in ast.parse(file.read_text()).body:
            if ast.unparse(node).startswith("__all__ = ["):
                names = ast.literal_eval(node.value)
                yield from (f"{module}.{name}" for name in names)


# The entries of the API reference, by what pages call them.
PATHS = list(public_paths())
NAMES = {path: path for path in PATHS} | short_names(PATHS)


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages whose files are in other folders."""
    for uri, path in ELSEWHERE.items():
        text, pictures = read(path)
        files.append(File.generated(config, uri, content=text))
        for name, content in pictures.items():
            files.append(
                File.generated(config, f"tutorials/{name}", content=content)
            )
    for module in MODULES:
        uri = f"reference/{module}.md"
        files.append(File.generated(config, uri, content=f"::: {module}\n"))
    return files


def on_page_markdown(markdown: str, page: Any, **others: Any) -> str:
    """Puts in tables of other files, and makes links of the site."""
    uri = page.file.src_uri
    text = TABLE.sub(lambda found: table(*found.groups()), markdown)
    text = LINK.sub(lambda found: link(uri, found), text)
    # What programs print is no link, and old names have no entry.
    if uri.startswith("tutorials/") or uri == "changelog.md":
        return text
    return with_links(text, NAMES)


def read(path: str) -> tuple[str, dict[str, bytes]]:
    """Returns the Markdown of a file of the repository, and its pictures.

    Args:
        path: String, the path of a Markdown file or of a notebook.
    """
    file = TOP / path
    if file.suffix == ".md":
        return file.read_text(), {}
    notebook = nbformat.read(file, as_version=4)
    notebook.metadata.language_info = {"name": "python"}
    notebook.cells = [cell for cell in notebook.cells if cell.source.strip()]
    names = {"output_files_dir": f"{file.stem}_files", "unique_key": file.stem}
    text, resources = MarkdownExporter().from_notebook_node(
        notebook, resources=names
    )
    return text, resources["outputs"]


def table(path: str, begin: str) -> str:
    """Returns the table of a file that has a head, which is its first line."""
    found = re.search(
        rf"^{re.escape(begin)}\n(\|.*\n)+", read(path)[0] + "\n", re.MULTILINE
    )
    if found is None:
        raise PluginError(f"{path} has no table that begins {begin}")
    return found[0]


def link(uri: str, found: re.Match[str]) -> str:
    """Returns a link of a page, as MkDocs has it.

    Args:
        uri: String, the path of the page.
        found: Match of `LINK` in it.
    """
    target, anchor = found[1], found[2] or ""
    here = posixpath.dirname(file_of(uri))
    path = posixpath.normpath(posixpath.join(here, target))
    if not (TOP / path).exists():
        return found[0]  # what is broken, MkDocs reports
    page = page_of(path)
    if page is None:
        return f"]({FILES}/{path}{anchor})"
    return f"]({posixpath.relpath(page, posixpath.dirname(uri))}{anchor})"


def file_of(uri: str) -> str:
    """Returns the path in the repository of the file of a page."""
    return ELSEWHERE.get(uri, f"{PAGES}/{uri}")


def page_of(path: str) -> str | None:
    """Returns the path of the page of a file, or `None` if it has none."""
    if path.startswith(f"{PAGES}/"):
        return posixpath.relpath(path, PAGES)
    by_file = {file: uri for uri, file in ELSEWHERE.items()}
    return by_file.get(path)
