"""What the API reference shows: the public names, and nothing internal.

Griffe reads the source, and so needs no framework. This extension of it decides
which class shows what internal bases define: a public class shows it in full,
and the public classes that derive from that one link to it.
"""

import re
from collections.abc import Iterable
from collections.abc import Mapping
from typing import Any

import griffe

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
CODE = re.compile(r"(?<![`\w\[])`([A-Za-z][\w.]*)(\(\))?`(?![`\]])")
EXAMPLE = re.compile(r"^>>> (?:.+(?:\n|\Z)|\n(?=>>> ))+", re.MULTILINE)


class PublicNames(griffe.Extension):
    """Leaves the public names of keras_dist, and makes names links."""

    def on_package(self, *, pkg: griffe.Module, **others: Any) -> None:
        """Changes the package after it was loaded."""
        if pkg.path != "keras_dist":
            return
        public = public_objects(pkg)
        # The first public path of each object, by its own path.
        paths: dict[str, str] = {}
        for path, each in public.items():
            paths.setdefault(each.path, path)
        classes = {
            each.path: Members(each, paths)
            for each in public.values()
            if each.is_class
        }
        for each in classes.values():
            each.place()
        names = {**{path: path for path in public}, **short_names(public)}
        for each in classes.values():
            for name in each.own:
                names[f"{each.path}.{name}"] = f"{each.path}.{name}"
        shown = [
            *public.values(),
            *map(pkg.modules_collection.get_member, MODULES),
        ]
        for each in classes.values():
            shown += each.own.values()
        for docstring in {id(x.docstring): x.docstring for x in shown}.values():
            if docstring is not None:
                text = with_links(docstring.value, names)
                docstring.value = EXAMPLE.sub(_as_code, text)
        for each in classes.values():
            each.tell_inherited()


def public_objects(
    pkg: griffe.Module,
) -> dict[str, griffe.Class | griffe.Function | griffe.Attribute]:
    """Returns what has a public name, by its public path."""
    found = {}
    for path in MODULES:
        module = pkg.modules_collection[path]
        for name in module.exports:
            each = module.members[str(name)]
            target = each.final_target if each.is_alias else each
            if target.is_module:
                continue
            if target.is_attribute and target.docstring is None:
                first = f"Another name of `{target.value}`."
                target.docstring = griffe.Docstring(first, parent=target)
            found[f"{path}.{name}"] = target
    return found


def short_names(public: Iterable[str]) -> dict[str, str]:
    """Returns the paths of the classes, by their names without a module."""
    found: dict[str, str] = {}
    for path in public:
        name = path.rpartition(".")[2]
        if name[0].isupper():
            found.setdefault(name, path)
    return found


def with_links(text: str, names: Mapping[str, str]) -> str:
    """Returns Markdown in which names link to their entries.

    Args:
        text: String.
        names: Dict of the entries' ids, by what is set as code.
    """

    def link(found: re.Match[str]) -> str:
        path = names.get(found[1])
        return f"[{found[0]}][{path}]" if path else found[0]

    parts = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
    parts[::2] = [CODE.sub(link, part) for part in parts[::2]]
    return "".join(parts)


def _as_code(example: re.Match[str]) -> str:
    return f"```pycon\n{example[0].rstrip()}\n```\n"


class Members:
    """What a public class has of its own, and of its bases.

    Args:
        cls: The class.
        paths: Dict of the public paths of public objects, by their own path.

    Attributes:
        path: String, its public path.
        own: Dict of the members that it shows, by name.
        inherited: Dict of the own paths of the public classes that show the
            others, by the name of the member.
    """

    def __init__(self, cls: griffe.Class, paths: Mapping[str, str]) -> None:
        self._cls = cls
        self._paths = paths
        self.path = paths[cls.path]
        self.own: dict[str, Any] = {}
        self.inherited: dict[str, str] = {}
        line = [cls, *cls.mro()]
        internal = set().union(*(INTERNAL.get(e.name, ()) for e in line))
        makers = [
            e.members.get(n) for e in line for n in ("__init__", "__new__")
        ]
        # What the arguments of the class are those of.
        self._maker = next(filter(None, makers), None) or _of_named_tuple(cls)
        self._above = [base for base in line[1:] if base.path in paths]
        for base in line:
            homes = [x for x in self._above if base.path in _line_of(x)]
            for name, member in base.members.items():
                if name.startswith("_") or name in internal:
                    continue
                if name in self.own or name in self.inherited:
                    continue
                if not _is_told(member, [x.members.get(name) for x in line]):
                    continue
                if homes:
                    self.inherited[name] = homes[-1].path
                else:
                    self.own[name] = member

    def place(self) -> None:
        """Gives the class the members that it shows, and takes the others."""
        for name, member in list(self._cls.members.items()):
            # Griffe reads the fields of dataclasses later, and then hides them.
            is_field = member.is_attribute and member.docstring is None
            if name not in {*self.own, "__init__"} and not is_field:
                del self._cls.members[name]
        maker = {} if self._maker is None else {"__init__": self._maker}
        for name, member in {**maker, **self.own}.items():
            if name not in self._cls.members:
                alias = griffe.Alias(name, member, parent=self._cls)
                self._cls.set_member(name, alias)
        bases = [
            griffe.ExprName(base.name, base.parent) for base in self._above[:1]
        ]
        foreign = [x for x in self._cls.bases if _is_foreign(x)]
        self._cls.bases = [*bases, *foreign]

    def tell_inherited(self) -> None:
        """Says in the docstring of the class what it has from others."""
        links: dict[str, list[str]] = {}
        for name, storage in sorted(self.inherited.items()):
            path = f"{self._paths[storage]}.{name}"
            links.setdefault(self._paths[storage], []).append(
                f"[`{name}`][{path}]"
            )
        for storage, each in links.items():
            of = f"[`{storage.rpartition('.')[2]}`][{storage}]"
            told = f"\n\nInherited from {of}: {', '.join(each)}."
            self._cls.docstring.value += told


def _of_named_tuple(cls: griffe.Class) -> griffe.Function | None:
    """Returns the constructor that `NamedTuple` gives a class, if it does."""
    if not any(str(base) == "NamedTuple" for base in cls.bases):
        return None
    fields = [
        griffe.Parameter(
            name,
            annotation=each.annotation,
            kind=griffe.ParameterKind.positional_or_keyword,
            default=each.value,
        )
        for name, each in cls.members.items()
        if each.is_attribute and not name.startswith("_")
    ]
    made = griffe.Parameters(griffe.Parameter("self"), *fields)
    return griffe.Function("__init__", parameters=made, parent=cls)


def _line_of(cls: griffe.Class) -> set[str]:
    return {cls.path, *(base.path for base in cls.mro())}


def _is_told(member: Any, others: list[Any]) -> bool:
    """Returns whether a member has a docstring, if only one of a base's."""
    if member.docstring is None:
        told = [x.docstring for x in others if x is not None and x.docstring]
        if told and member.is_function:
            member.docstring = griffe.Docstring(told[0].value, parent=member)
    return member.docstring is not None


def _is_foreign(base: Any) -> bool:
    path = getattr(base, "canonical_path", str(base))
    return not path.startswith("keras_dist.")
