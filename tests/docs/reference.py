"""Builds the API reference: `python tests/docs/reference.py [FOLDER]`.

Pages are those of the public modules. What a public class has from an internal
base is shown in full in the first public class that has it, and as a link in
the classes that derive from that one.
"""

import argparse
import enum
import importlib
import pathlib
import warnings

import pdoc
import pdoc.doc
import pdoc.render

MODULES = (
    "keras_dist",
    "keras_dist.cluster_resolver",
    "keras_dist.compat",
    "keras_dist.compat.v1",
    "keras_dist.errors",
    "keras_dist.experimental",
    "keras_dist.launch",
    "keras_dist.plugins",
    "keras_dist.testing",
    "keras_dist.tpu",
    "keras_dist.tpu.experimental",
)
# What modules of ours use of each other's objects, and nobody else should.
INTERNAL = {
    "DistributedDataset": {"global_batches", "restarts"},
    "Strategy": {
        "combine",
        "combine_all",
        "cross_replica",
        "has_components",
        "if_current",
        "run_uncompiled",
        "to_combine",
    },
}


def load(names: tuple[str, ...]) -> dict[str, pdoc.doc.Module]:
    """What pdoc knows of some modules, by name."""
    with warnings.catch_warnings():
        # Warnings are errors in our pages, not in what frameworks import.
        warnings.simplefilter("ignore")
        for name in names:
            module = importlib.import_module(name)
            for public in module.__all__:
                getattr(module, public)  # some load what is used only
    return {name: pdoc.doc.Module.from_name(name) for name in names}


def definer(cls: type, name: str) -> type:
    """The class of those that one derives from which has a member."""
    for base in cls.__mro__:
        if name in {*vars(base), *vars(base).get("__annotations__", ())}:
            return base
    return cls


def is_shown(cls: type, member: pdoc.doc.Doc) -> bool:
    """Whether the pages show a member: what is ours, and for others."""
    name = member.name
    if name == "__init__":
        return not issubclass(cls, BaseException)
    if isinstance(member, pdoc.doc.Variable) and not member.docstring:
        # Fields are in the docstring of their class, a choice is not always.
        return issubclass(cls, enum.Enum)
    module = definer(cls, name).__module__
    bases = {base.__name__ for base in cls.__mro__}
    return (
        module.startswith("keras_dist")
        and not name.startswith("_")
        and not any(name in INTERNAL.get(base, ()) for base in bases)
    )


def name_aliases(modules: dict[str, pdoc.doc.Module]) -> None:
    """Says of what a second name is one."""
    for module in modules.values():
        for variable in module.variables:
            thing = getattr(module.obj, variable.name)
            if not variable.docstring and isinstance(thing, type):
                first = f"{module.modulename}.{thing.__qualname__}"
                variable.docstring = f"Another name of `{first}`."


def settle_members(modules: dict[str, pdoc.doc.Module]) -> None:
    """Decides which class shows what internal bases define."""
    classes = [each for module in modules.values() for each in module.classes]
    public = {each.obj: each for each in reversed(classes)}
    for each in classes:
        above = [base for base in each.obj.__mro__[1:] if base in public]
        own, linked = [], {}
        each.members = {
            name: member
            for name, member in each.members.items()
            if is_shown(each.obj, member)
        }
        for name, member in each.members.items():
            by = definer(each.obj, name)
            homes = [base for base in above if issubclass(base, by)]
            if not homes:
                own.append(member)
            elif name != "__init__":
                home = public[homes[-1]]
                place = (home.modulename, home.qualname)
                member.taken_from = (place[0], f"{place[1]}.{name}")
                linked.setdefault(place, []).append(member)
        each.own_members, each.inherited_members = own, linked
        each.bases = [
            (public[base].modulename, public[base].qualname, base.__qualname__)
            for base in above[:1]
        ]


def build(folder: pathlib.Path) -> None:
    """Writes the pages.

    Args:
        folder: `pathlib.Path` of a folder, made if it is not there.
    """
    modules = load(MODULES)
    settle_members(modules)
    name_aliases(modules)
    pdoc.render.configure(docformat="google", show_source=False)
    for name, module in modules.items():
        page = folder / f"{name.replace('.', '/')}.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(pdoc.render.html_module(module, modules))
    (folder / "index.html").write_text(pdoc.render.html_index(modules))
    (folder / "search.js").write_text(pdoc.render.search_index(modules))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "folder", nargs="?", default="build/reference", type=pathlib.Path
    )
    build(parser.parse_args().folder)
