"""Attributes of others are replaced by tables, while somebody needs that."""

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


def test_they_are_in_place_while_one_needs_them():
    hooks, original = _hooks(1), Base.value
    with hooks:
        assert Base().value() == 2
        with hooks:
            pass
        assert Base().value() == 2
    assert Base.value is original


@pytest.mark.parametrize("first", [0, 1])
def test_tables_leave_in_any_order(first):
    tables, original = [_hooks(1), _hooks(10)], Base.value
    for each in tables:
        each.__enter__()
    assert Base().value() == 12
    tables.pop(first).__exit__()
    assert Base().value() == (11 if first == 0 else 2)
    tables.pop().__exit__()
    assert Base.value is original


def test_a_row_of_two_tables_is_there_once():
    row = Hook(Base, "value", _adding(1), "it is more")
    one, other = Hooks(lambda: [row]), Hooks(lambda: [row])
    with one:
        with other:
            assert Base().value() == 2
        assert Base().value() == 2
    assert Base().value() == 1


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


def test_an_attribute_that_is_inherited_is_so_again():
    class Child(Base):
        pass

    with Hooks(lambda: [Hook(Child, "value", _adding(1), "it is more")]):
        assert Child().value() == 2
    assert "value" not in vars(Child)


def test_what_others_put_on_top_stays():
    hooks, original = _hooks(1), Base.value
    with hooks:
        ours = Base.value
        Base.value = lambda self: 100 * ours(self)
        theirs = Base.value
    assert Base.value is theirs
    with hooks:
        assert Base.value is theirs
        assert Base().value() == 200
    # They take it off again.
    Base.value = ours
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


def test_what_others_take_off_meanwhile():
    hooks, original = _hooks(1), Base.value
    Base.value = lambda self: 100 * original(self)
    with hooks:
        assert Base().value() == 101
        Base.value = original
    with hooks:
        assert Base().value() == 2
    assert Base.value is original


def test_a_table_that_comes_after_others_is_on_top():
    one, other, original = _hooks(1), _hooks(10), Base.value
    with one:
        ours = Base.value
        Base.value = functools.wraps(ours)(lambda self: 100 * ours(self))
        theirs = Base.value
        with other:
            assert Base().value() == 210
        assert Base.value is theirs
        Base.value = ours
    assert Base.value is original


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


def test_the_first_threads_make_one_table():
    made, ready = [], threading.Barrier(2)

    def table():
        ready.wait(10)
        made.append(None)
        return [Hook(Base, "value", _adding(1), "it is more")]

    hooks, original, found = Hooks(table), Base.value, []

    def work():
        with hooks:
            found.append(hooks.rows())

    threads = [threading.Thread(target=work) for _ in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(made) == 2
    assert found[0] is found[1]
    assert Base.value is original


def test_threads_come_and_go():
    hooks, original = _hooks(1), Base.value
    wrong = []

    def work():
        for _ in range(300):
            with hooks:
                if Base().value() != 2:
                    wrong.append(True)
                hooks.stay_with(Base())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    gc.collect()
    assert not wrong
    assert Base.value is original


def test_a_function_takes_its_arguments_by_name():
    module = types.ModuleType("module")
    module.double = lambda value: 2 * value
    hook = as_hook(lambda original, value: original(value) + 1)
    with Hooks(lambda: [Hook(module, "double", hook, "it is more")]):
        assert [module.double(2), module.double(value=2)] == [5, 5]


def test_warnings_of_a_module_are_seen():
    module = types.ModuleType("module")
    exec(
        "import warnings\ndef give(text): warnings.warn(text, stacklevel=2)",
        vars(module),
    )
    see = seen_warnings(lambda text: text == "dropped")
    row = Hook(module, "warnings", see, "it is seen")
    with Hooks(lambda: [row]), pytest.warns(UserWarning) as caught:
        module.give("dropped")
        module.give("kept")
    assert [(str(w.message), w.filename) for w in caught] == [
        ("kept", __file__)
    ]
    assert module.warnings is warnings
