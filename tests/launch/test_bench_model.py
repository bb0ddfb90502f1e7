"""`keras-dist bench --model` says what is wrong with a user's function."""

import sys

import keras
import numpy as np
import pytest

from keras_dist.bench import fit
from keras_dist.tools import users_function

GOOD = """
import keras
import numpy as np

def make(width=2, rows=8):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model, np.ones((rows, width), "float32"), np.ones((rows, 1))
"""

# A module that is not good, by what is in it.
MODULES = {
    "bad_syntax": "import keras\n\ndef make(:\n    pass\n",
    "bad_number": "import keras\n\nRATE = 1 / 0\n",
    "bad_helper": "import keras\nimport bad_number\n",
    "bad_import": "import no_such_package\n",
    "bad_from": "from os import no_such_name\n",
    "bad_attribute": "import keras\n\nlayer = keras.layers.NoSuchLayer\n",
    "bad_exit": "import sys\n\nsys.exit(3)\n",
    "bad_lines": 'raise ValueError("one\\n\\n  two")\n',
    "bad_bytes": b'name = "\xff"\n',
    "bad_nulls": b"name = 3\0\n",
    "theirs": GOOD
    + """
import sys

def leave():
    sys.exit()

def takes(a, *, b=3):
    return a

def takes_too_much(*, path):
    return path

class Maker:
    def __call__(self):
        return make()

    def method(self):
        return make()

maker = Maker()
method = Maker.method
with_defaults = lambda width=2: make(width)

def fails_in_keras():
    return keras.layers.Dense(-1)

def wrong_shape():
    return make(width=3)

def wrong_labels():
    model, x, y = make()
    return model, x, np.ones((8, 5, 7))

def no_rows():
    model, x, y = make()
    return model, x, np.array(1.0)

def of_lists():
    model, x, y = make()
    return model, x.tolist(), y

def of_unequal_lengths():
    model, x, y = make()
    return model, x, y[1:]

def of_few_rows():
    return make(rows=3)

def not_compiled():
    model, x, y = make()
    return keras.Sequential([keras.layers.Dense(1)]), x, y

def no_data():
    return make()[0]

NUMBER = 3

def grows():
    return make(rows=20)

made = []

def only_once():
    made.append(1)
    if len(made) > 1:
        raise OSError("the file was read already")
    return make()
""",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("models")
    for name, text in MODULES.items():
        content = text if isinstance(text, bytes) else text.encode()
        (made / f"{name}.py").write_bytes(content)
    package = made / "pack"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "models.py").write_text(GOOD)
    return made


@pytest.fixture(autouse=True)
def there(folder, monkeypatch):
    """The working directory has the modules."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(folder)
    known = set(sys.modules)
    yield
    for name in set(sys.modules) - known:
        if name.partition(".")[0] in {*MODULES, "pack"}:
            del sys.modules[name]


def message_of(spec, rows=8):
    with pytest.raises(ValueError) as caught:
        fit.users_task(spec, rows)
    message = str(caught.value)
    assert len(message.splitlines()) == 1 and "\x1b" not in message
    assert message.startswith("--model ")
    return message


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("syntax", "in bad_syntax.py, line 3, with SyntaxError: "),
        ("number", "in bad_number.py, line 3, with ZeroDivisionError: div"),
        ("helper", "in bad_number.py, line 3, with ZeroDivisionError: "),
        ("import", "in bad_import.py, line 1, with ModuleNotFoundError: No"),
        ("from", "in bad_from.py, line 1, with ImportError: cannot "),
        ("attribute", "in bad_attribute.py, line 3, with AttributeError: "),
        ("exit", "in bad_exit.py, line 3, with SystemExit: 3"),
        ("lines", "in bad_lines.py, line 1, with ValueError: one two"),
        ("bytes", ", with SyntaxError: (unicode error)"),
        ("nulls", ", with SyntaxError: source code string cannot contain"),
    ],
)
def test_a_module_that_fails_is_told_with_the_place(name, expected):
    message = message_of(f"bad_{name}:make")
    assert message.startswith(f"--model bad_{name}:make: the module failed")
    assert expected in message
    for wrong in ("can't import", "no attribute 'make'", "searched"):
        assert wrong not in message


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("leave", "the function failed in theirs.py, line 13, with SystemExit"),
        ("takes", "the function takes arguments. Received: (a, *, b=3)"),
        ("takes_too_much", "the function takes arguments"),
        ("method", "the function takes arguments"),
        ("fails_in_keras", "the function failed in theirs.py, line 33, with "),
        ("absent", "the module has no attribute 'absent'"),
        ("no_rows", "of such arrays. Received: ndarray of shape ()"),
        ("of_lists", "must be NumPy arrays with rows"),
        ("of_unequal_lengths", "Received: [7, 8] rows"),
        ("of_few_rows", "at least --batch-size. Received: [3] rows"),
        ("not_compiled", "Call `model.compile` in the function"),
        ("no_data", "Sequential. Expected: a tuple (model, x, y)"),
        ("NUMBER", "not a function. Received: 3"),
    ],
)
def test_a_function_that_is_no_use_is_told(name, expected):
    message = message_of(f"theirs:{name}")
    assert message.startswith(f"--model theirs:{name}: ")
    assert expected in message
    assert "fit.py" not in message and "users_function.py" not in message


def test_frameworks_may_lie_in_folders_of_any_name(folder, monkeypatch):
    monkeypatch.setattr(users_function, "_INSTALLED", ())
    message = message_of("theirs:fails_in_keras")
    assert "the function failed in theirs.py, line 33, with " in message


def test_a_module_that_is_missing_is_told(folder):
    for module in ("missing", "pack.missing", "theirs.inner"):
        message = message_of(f"{module}:make")
        assert f"--model {module}:make: can't import '{module}'" in message
        assert f"looked in {folder}" in message
    for spec in ("theirs", ":make", "theirs:"):
        assert "Expected: 'module:function'" in message_of(spec)


@pytest.mark.parametrize(
    ("spec", "hint"),
    [
        ("theirs.py:make", "without '.py', 'theirs:make'"),
        ("./theirs.py:make", "without '.py', 'theirs:make'"),
        ("pack/models.py:make", "without '.py', 'pack.models:make'"),
        ("theirs.py:", "without '.py', 'theirs:function'"),
    ],
)
def test_a_files_name_is_an_error_with_a_hint(spec, hint):
    message = message_of(spec)
    assert "--model names a module, not a file" in message
    assert hint in message


def test_the_hint_is_right(folder, monkeypatch):
    spec = message_of("pack/models.py:make").split("'")[5]
    assert fit.users_task(spec, 8).name == "pack.models:make"
    # A file elsewhere has a folder of its own.
    monkeypatch.chdir(folder / "pack")
    for path in ("..", folder):
        message = message_of(f"{path}/theirs.py:make")
        assert "'theirs:make', in a folder" in message


@pytest.mark.parametrize("name", ["make", "maker", "with_defaults"])
def test_what_can_be_called_without_arguments_is_called(name):
    task = fit.users_task(f"theirs:{name}", 8)
    assert task.name == f"theirs:{name}"


@pytest.mark.parametrize("name", ["wrong_shape", "wrong_labels"])
def test_data_that_the_model_can_not_take_is_told(name):
    message = message_of(f"theirs:{name}", rows=4)
    assert message.startswith(
        f"--model theirs:{name}: plain Keras can't train the model on its "
        "data. `model.fit` with one batch of 4 rows of `x` and `y` failed with "
    )
    assert "Error: " in message


def test_frames_and_colors_in_a_message_are_left_out():
    message = (
        "\x1b[1mGraph error\x1b[0m, at (most recent call last):\n"
        '  File "keras/trainer.py", line 3, in fit\n\n'
        "Received a label of 9"
    )
    assert users_function.error_line(RuntimeError(message)) == (
        "RuntimeError: Graph error, at (most recent call last): Received a "
        "label of 9"
    )


def test_rows_are_repeated_where_there_are_too_few():
    task = fit.users_task("theirs:grows", 8)
    task.x = np.arange(20.0)[:, np.newaxis]
    x, y = task.data(5)
    assert (x.shape, y.shape) == ((40, 1), (40, 1))
    np.testing.assert_array_equal(x[20:], x[:20])


def test_the_trial_changes_no_arms_weights():
    task = fit.users_task("theirs:make", 8)
    keras.utils.set_random_seed(0)
    expected = sys.modules["theirs"].make()[0].get_weights()
    model = task.model()
    for weight, value in zip(model.get_weights(), expected, strict=True):
        np.testing.assert_array_equal(weight, value)
    assert int(model.optimizer.iterations) == 0
    np.testing.assert_array_equal(task.data(1)[0], np.ones((8, 2)))


def test_a_function_that_works_only_once_is_told():
    task = fit.users_task("theirs:only_once", 8)
    with pytest.raises(
        ValueError, match="only_once: the function failed in theirs.py"
    ):
        task.model()


@pytest.mark.parametrize("spec", ["bad_exit:make", "theirs:wrong_shape"])
def test_the_command_ends_with_the_error_alone(refused, monkeypatch, spec):
    monkeypatch.setattr(fit, "measure_fit", None)
    told = refused(f"bench --devices 4 --model {spec}")
    assert f"Error: --model {spec}: " in told
    assert "Traceback" not in told
