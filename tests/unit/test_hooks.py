"""Attributes of Keras are replaced by tables only, while somebody needs it."""

import ast
import functools
import gc
import threading
import types
import warnings
from pathlib import Path
from unittest.mock import Mock

import pytest

from keras_dist.internals.hooks import Hook
from keras_dist.internals.hooks import Hooks
from keras_dist.internals.hooks import as_hook
from keras_dist.internals.hooks import seen_warnings
from keras_dist.plugin.front_end import HOOKS

ROOT = Path(__file__).parents[2]
# What is set elsewhere, and why that is right.
KNOWN = {
    # Python 3.13 and older can't take back a `__new__`.
    "keras.Variable.__new__",
    # The state of this thread, by which Keras knows the open scope.
    "global_state.GLOBAL_STATE_TRACKER.stateless_scope",
    # A connection that was closed, so that JAX does not close it once more.
    "distributed.global_state.client",
    # The process group that a mesh is made of, which Keras must not see.
    "GroupMember.['WORLD']",
}


def _foreign_names(tree):
    """Names in a module that stand for modules and objects of others."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                yield (each.asname or each.name).split(".")[0]
        elif isinstance(node, ast.ImportFrom) and node.module:
            for each in node.names:
                yield each.asname or each.name
        elif isinstance(node, ast.Assign):
            is_private = ast.unparse(node.value).startswith("private(")
            yield from map(ast.unparse, node.targets if is_private else [])


def _set_in(tree):
    """Attributes that a module sets, deletes or replaces for a while."""
    for node in ast.walk(tree):
        targets = []
        if isinstance(node, (ast.Assign, ast.Delete)):
            targets = node.targets
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
            targets = [node.target]
        for target in targets:
            if isinstance(target, ast.Attribute) and "(" not in (
                name := ast.unparse(target)
            ):
                yield name
        if isinstance(node, ast.Call) and node.args:
            called = ast.unparse(node.func).split(".")[-1]
            owner = ast.unparse(node.args[0])
            if called in ("setattr", "delattr"):
                yield f"{owner}.{ast.unparse(node.args[1])}"
            elif called == "replaced":
                yield f"{owner}.{[each.arg for each in node.keywords]}"


def _is_foreign(name, tree):
    root = name.split(".")[0]
    own = root in ("self", "cls", "model") or root[0] == "_"
    return not own and root in set(_foreign_names(tree)) - {"os", "sys"}


def test_nothing_else_sets_attributes_of_others():
    found = {
        (str(path.relative_to(ROOT)), name)
        for folder in ("keras_dist", "backends")
        for path in (ROOT / folder).rglob("*.py")
        for tree in [ast.parse(path.read_text())]
        for name in _set_in(tree)
        if _is_foreign(name, tree)
    }
    known = {each for each in found if each[1] in KNOWN}
    assert {name for _, name in known} == KNOWN
    assert found == known, "It belongs into a table: see CONTRIBUTING."


def test_each_row_says_why_and_is_there():
    for row in HOOKS.rows():
        assert row.why[0].islower() or row.why[0] in "`KXT", row.why
        assert not row.why.endswith(".")
    places = [(r.owner, r.name, r.in_subclasses) for r in HOOKS.rows()]
    assert len(places) > 40


class Base:
    def value(self):
        return 1


class Own(Base):
    def value(self):
        return 10


def _adding(number):
    @as_hook
    def hook(original, self):
        return original(self) + number

    return hook


def _hooks(number, **options):
    row = Hook(Base, "value", _adding(number), "it is more", **options)
    return Hooks(lambda: [row])


def test_tables_leave_in_any_order():
    one, other, original = _hooks(1), _hooks(10), Base.value
    for first, left in ((one, 11), (other, 2)):
        for each in (one, other):
            each.__enter__()
        # Inside, and beside, the same row is there once.
        with one, Hooks(one.rows):
            assert Base().value() == 12
        first.__exit__()
        assert Base().value() == left
        (other if first is one else one).__exit__()
        assert Base.value is original


def test_they_stay_with_objects():
    hooks, owners = _hooks(1), [Base(), Base()]
    for each in owners:
        hooks.stay_with(each)
    del each
    owners.pop()
    gc.collect()
    assert Base().value() == 2
    owners.pop()
    gc.collect()
    assert Base().value() == 1


def test_methods_that_override():
    hooks, original = _hooks(1, in_subclasses=True), Own.value
    with hooks:

        class Later(Own):
            def value(self):
                return 100

        class Inherits(Later):
            pass

        assert Base().value() == 1
        assert [Own().value(), Later().value()] == [11, 101]
        assert Inherits().value() == 101
    assert Own.value is original
    assert [Later().value(), Inherits().value()] == [100, 100]
    assert "__init_subclass__" not in vars(Base)
    assert "value" not in vars(Inherits)


def test_what_others_put_on_top_stays():
    hooks, other, original = _hooks(1), _hooks(10), Base.value
    with hooks:
        ours = Base.value
        Base.value = theirs = lambda self: 100 * ours(self)
    assert Base.value is theirs
    with hooks:
        assert Base.value is theirs
        assert Base().value() == 200
        # A table that comes later is above it.
        with other:
            assert Base().value() == 210
        assert Base.value is theirs
    # They take it off again.
    Base.value = ours
    with hooks:
        assert Base().value() == 2
    assert Base.value is original
    # And they do so while hooks are there.
    Base.value = lambda self: 100 * original(self)
    with hooks:
        assert Base().value() == 101
        Base.value = original
    with hooks:
        assert Base().value() == 2
    assert Base.value is original


@pytest.mark.parametrize("wrap", [lambda f: Mock(wraps=f), functools.partial])
def test_what_others_put_on_is_known_however_they_wrap(wrap):
    hooks, original = _hooks(1), Base.value
    with hooks:
        Base.value = staticmethod(wrap(Base.value))
        theirs = vars(Base)["value"]
        with hooks:
            assert Base.value(Base()) == 2
            assert vars(Base)["value"] is theirs
    Base.value = original


def test_a_hook_that_fails_leaves_all_as_it_was():
    fails = [True]

    def make(original):
        if fails:
            raise RuntimeError("It can't be made.")
        return lambda self: original(self) + 10

    rows = [
        Hook(Base, "value", _adding(1), "it is more"),
        Hook(Own, "value", make, "it is more"),
    ]
    hooks, originals = Hooks(lambda: rows), (Base.value, Own.value)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="can't be made"):
            hooks.__enter__()
        assert (Base.value, Own.value) == originals
    fails.clear()
    with hooks:
        assert [Base().value(), Own().value()] == [2, 20]
    assert (Base.value, Own.value) == originals


def _in_threads(count, work):
    threads = [threading.Thread(target=work) for _ in range(count)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    gc.collect()


def test_threads_come_and_go():
    made, ready, found = [], threading.Barrier(4), []

    def table():
        ready.wait(10)
        made.append(None)
        return [Hook(Base, "value", _adding(1), "it is more")]

    hooks, original = Hooks(table), Base.value

    def work():
        for _ in range(300):
            with hooks:
                found.append((Base().value(), id(hooks.rows())))
                hooks.stay_with(Base())

    _in_threads(4, work)
    # Each of the first ones makes a table, and all use the same one.
    assert len(made) == 4
    assert set(found) == {(2, id(hooks.rows()))}
    assert Base.value is original


def test_functions_and_attributes_that_are_inherited():
    class Child(Base):
        pass

    module = types.ModuleType("module")
    module.double = lambda value: 2 * value
    more = as_hook(lambda original, value: original(value) + 1)
    rows = [
        Hook(module, "double", more, "it is more"),
        Hook(Child, "value", _adding(1), "it is more"),
    ]
    with Hooks(lambda: rows):
        assert [module.double(2), module.double(value=2)] == [5, 5]
        assert Child().value() == 2
    assert "value" not in vars(Child)


def test_warnings_of_a_module_are_seen():
    module = types.ModuleType("module")
    source = (
        "import warnings\ndef give(text): warnings.warn(text, stacklevel=2)"
    )
    exec(source, vars(module))
    see = seen_warnings(lambda text: text == "dropped")
    row = Hook(module, "warnings", see, "it is seen")
    with Hooks(lambda: [row]), pytest.warns(UserWarning) as caught:
        module.give("dropped")
        module.give("kept")
    (kept,) = caught
    assert (str(kept.message), kept.filename) == ("kept", __file__)
    assert module.warnings is warnings
