"""The API reference builds without a warning, and lacks nothing."""

import pathlib
import pkgutil
import re
import subprocess
import sys

import pytest

from docs.pages import Page
from public_names import PUBLIC

pytestmark = pytest.mark.runs_on("torch")


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Each page by the name of its module, as the documented command makes."""
    folder = tmp_path_factory.mktemp("reference")
    script = pathlib.Path(__file__).parent / "reference.py"
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script), str(folder)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stdout
    found = {}
    for path in folder.rglob("*.html"):
        parts = path.relative_to(folder).with_suffix("").parts
        found[".".join(parts)] = Page(path)
    return found


def _documented(pages):
    return {name: page for name, page in pages.items() if name != "index"}


def test_there_is_a_page_for_each_public_module(pages):
    assert sorted(_documented(pages)) == sorted(PUBLIC)


@pytest.mark.parametrize("module", PUBLIC)
def test_each_public_name_has_an_entry_with_text(pages, module):
    page = pages[module]
    assert page.texts[""].strip(), "the module has no docstring"
    for name in PUBLIC[module]:
        if f"{module}.{name}" not in PUBLIC:
            assert page.texts.get(name, "").strip(), f"{module}.{name}"


@pytest.mark.parametrize("module", PUBLIC)
def test_each_public_name_has_no_other_neighbour(pages, module):
    entries = {name.split(".")[0] for name in pages[module].texts} - {""}
    assert entries <= set(PUBLIC[module])


def test_each_method_and_property_has_text(pages):
    for module, page in _documented(pages).items():
        for name, text in page.texts.items():
            owner, _, member = name.rpartition(".")
            if member.isupper():
                # What the choices of an enumeration are, its class says.
                assert f"`{member}`" in _doc(module, owner), name
            elif member != "__init__":
                assert text.strip(), f"{module}.{name}"


def _doc(module, name):
    return pkgutil.resolve_name(f"{module}:{name}").__doc__


def test_strategies_link_to_what_they_share(pages):
    page = pages["keras_dist"]
    assert "Strategy.run" in page.texts
    assert "MirroredStrategy.run" not in page.texts
    assert "#Strategy.run" in page.links
    assert "Strategy.if_current" not in page.names


def test_each_link_leads_somewhere(pages):
    by_path = {page.path.resolve(): page for page in pages.values()}
    for page in pages.values():
        for link in page.links:
            if re.match(r"https?://", link):
                continue
            file, _, name = link.partition("#")
            path = (page.path.parent / file).resolve() if file else page.path
            assert path.resolve() in by_path, link
            assert not name or name in by_path[path.resolve()].names, link


def test_each_name_in_backticks_exists(pages):
    seen = 0
    for module, page in _documented(pages).items():
        for text, _ in page.codes:
            if re.fullmatch(r"keras_dist(\.\w+)+", text):
                seen += 1
                assert _exists(text), f"{module} has `{text}`"
    assert seen > 10


def _exists(name):
    try:
        pkgutil.resolve_name(name)
    except (AttributeError, ImportError):
        return False
    return True
