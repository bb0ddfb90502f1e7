"""The documentation site builds without a warning, and lacks nothing."""

import importlib.util
import inspect
import os
import pathlib
import pkgutil
import re
import subprocess
import sys
import tomllib
import urllib.parse

import pytest

from docs.pages import Page
from keras_dist import errors
from keras_dist.cli.explain import sections
from public_names import PUBLIC

# It is made from the sources, without a framework.
pytestmark = pytest.mark.runs_on("torch")

TOP = pathlib.Path(__file__).parents[2]
DOCS = TOP / "docs"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site, made as CI makes it."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    done = subprocess.run(
        [*command, "-f", str(DOCS / "mkdocs.yml"), "-d", str(folder)],
        capture_output=True,
        text=True,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site):
    """Each page by its address in the site."""
    paths = (path for path in site.rglob("*.html") if path.name != "404.html")
    found = {}
    for path in paths:
        address = path.parent.relative_to(site).as_posix()
        found["" if address == "." else f"{address}/"] = Page(path)
    return found


@pytest.fixture(scope="module")
def reference(pages):
    """The pages of the API reference by the names of their modules."""
    return {
        address.split("/")[1]: page
        for address, page in pages.items()
        if address.startswith("reference/")
    }


def test_each_link_leads_somewhere(site, pages):
    seen = 0
    for address, page in pages.items():
        for link in page.links:
            # Some pages name addresses as messages have them.
            where = urllib.parse.urljoin(f"{errors.SITE}{address}", link)
            if not where.startswith(errors.SITE):
                assert link.startswith("https://"), f"{address}: {link}"
                continue
            path, _, name = where.removeprefix(errors.SITE).partition("#")
            assert path in pages, f"{address} links to {link}"
            name = urllib.parse.unquote(name)
            assert not name or name in pages[path].names, f"{address}: {link}"
            seen += 1
    assert seen > 1000


def test_a_reader_without_a_network_sees_all(site, pages):
    for address, page in pages.items():
        for loaded in page.loaded:
            if loaded.startswith("data:"):
                continue
            path = page.path.parent / urllib.parse.urlsplit(loaded).path
            assert path.is_file(), f"{address} loads {loaded}"
    styles = list(site.rglob("*.css"))
    assert len(styles) > 2
    for style in styles:
        assert not re.search(r"url\(.?https?:|@import", style.read_text())


def test_each_error_leads_to_its_section(pages):
    page = pages["errors/"]
    for name in errors.__all__:
        error = getattr(errors, name)("It failed.")
        if error.section:
            (address,) = re.findall(r"https://\S+?(?=,)", str(error))
            assert address.startswith(f"{errors.SITE}errors/#")
            assert address.partition("#")[2] in page.names
    for section in sections():
        assert errors.anchor_of(section) in page.names


def test_the_addresses_are_those_of_the_project():
    project = tomllib.loads((TOP / "pyproject.toml").read_text())["project"]
    urls = project["urls"]
    assert urls["Homepage"] == urls["Documentation"] == errors.SITE
    settings = (DOCS / "mkdocs.yml").read_text()
    assert f"site_url: {errors.SITE}\n" in settings
    assert f"link: {urls['Source']}\n" in settings
    files = f'FILES = "{urls["Source"]}/blob/main"'
    assert files in (DOCS / "hooks.py").read_text()
    assert urls["Changelog"] == f"{urls['Source']}/blob/main/CHANGELOG.md"
    assert urls["Issues"] == f"{urls['Source']}/issues"


def test_pages_link_names_to_the_reference(pages):
    for name in errors.__all__:
        entry = f"../reference/keras_dist/#keras_dist.{name}"
        assert entry in pages["errors/"].links


def test_each_tutorial_has_a_page(pages):
    names = {path.stem for path in TOP.glob("tutorials/*.ipynb")}
    assert len(names) > 5
    for name in names:
        assert "assert" in "".join(pages[f"tutorials/{name}/"].codes)


def test_tables_of_other_files_are_there(pages):
    assert "save_sharded" in pages["status/"].codes
    assert "@tf.function" in pages["coming_from/"].codes
    assert "set_distribution(...)" in pages["coming_from/"].codes


def test_the_reference_has_a_page_for_each_public_module(reference):
    assert sorted(reference) == sorted(PUBLIC)


@pytest.mark.parametrize("module", PUBLIC)
def test_each_public_name_has_an_entry_with_text(reference, module):
    texts = reference[module].texts
    assert texts[module].strip(), "the module has no docstring"
    for name in PUBLIC[module]:
        if f"{module}.{name}" not in PUBLIC:
            assert texts.get(f"{module}.{name}", "").strip(), name


@pytest.mark.parametrize("module", PUBLIC)
def test_each_public_name_has_no_other_neighbour(reference, module):
    entries = {*reference[module].texts} - {"", module}
    names = {entry.removeprefix(f"{module}.") for entry in entries}
    assert {name.split(".")[0] for name in names} <= set(PUBLIC[module])


def _extension():
    """The module that chooses what the reference shows."""
    path = DOCS / "griffe_extension.py"
    spec = importlib.util.spec_from_file_location("griffe_extension", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _members(cls):
    """The names of a class' public methods and properties, of any base."""
    kinds = {"class method", "method", "property", "static method"}
    return [
        each.name
        for each in inspect.classify_class_attrs(cls)
        if each.kind in kinds
        and each.defining_class.__module__.startswith("keras_dist")
        and not each.name.startswith("_")
    ]


@pytest.mark.parametrize("module", PUBLIC)
def test_each_method_and_property_has_text_or_a_link(reference, module):
    internal = _extension().INTERNAL
    page = reference[module]
    for name in PUBLIC[module]:
        cls = pkgutil.resolve_name(f"{module}:{name}")
        if not isinstance(cls, type) or cls.__name__ != name:
            continue
        hidden = set().union(
            *(internal.get(base.__name__, ()) for base in cls.__mro__)
        )
        for member in _members(cls):
            entry = f"{module}.{name}.{member}"
            links = page.linked[f"{module}.{name}"]
            is_linked = any(link.endswith(f".{member}") for link in links)
            if member in hidden:
                assert entry not in page.names
                assert not is_linked
            else:
                text = page.texts.get(entry, "")
                assert text.strip() or is_linked, entry


def test_strategies_link_to_what_they_share(reference):
    page = reference["keras_dist"]
    assert "keras_dist.Strategy.run" in page.texts
    assert "keras_dist.MirroredStrategy.run" not in page.texts
    linked = page.linked["keras_dist.MirroredStrategy"]
    assert "#keras_dist.Strategy.run" in linked


def test_each_name_in_code_exists(pages):
    project = tomllib.loads((TOP / "pyproject.toml").read_text())["project"]
    groups = project["entry-points"]
    seen = 0
    for address, page in pages.items():
        # The changelog has names of all times.
        if address == "changelog/":
            continue
        for text in page.codes:
            if re.fullmatch(r"keras_dist(\.\w+)+", text):
                seen += 1
                assert text in groups or _exists(text), f"{address}: {text}"
    assert seen > 50


def _exists(name):
    try:
        pkgutil.resolve_name(name)
    except (AttributeError, ImportError):
        return False
    return True
