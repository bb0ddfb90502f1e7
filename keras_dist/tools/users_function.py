"""Finds and calls the function of `--model`, and explains its errors."""

import importlib
import inspect
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable
from typing import Any
from typing import NoReturn

_STDLIB = sysconfig.get_path("stdlib") + os.sep
_INSTALLED = ("site-packages", "dist-packages")
# Packages that may lie in a folder of another name, on PYTHONPATH.
_PACKAGES = (
    *("keras", "jax", "tensorflow", "torch", "keras_dist"),
    *("keras_dist_jax", "keras_dist_tensorflow", "keras_dist_torch"),
)
_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_FRAME = re.compile(r'\s*File ".*", line \d+')
_MISSING = object()


def function_of(spec: str) -> Callable[[], Any]:
    """Returns the function that a user named as `"module:function"`."""
    module, name = _names(spec)
    # `python -m` searches in the working directory too.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    imported = _imported(spec, module)
    function = getattr(imported, name, _MISSING)
    if function is _MISSING:
        raise ValueError(
            f"--model {spec}: the module has no attribute {name!r}. Received: "
            f"{imported!r}. Expected: a module with a function of that name."
        )
    if not callable(function):
        raise ValueError(
            f"--model {spec}: not a function. Received: {function!r}."
        )
    _check_takes_nothing(spec, function)
    checked: Callable[[], Any] = function
    return checked


def called(
    spec: str, function: Callable[[], Any], what: str = "the function"
) -> Any:
    """Calls the user's code and returns its result; `what` is for errors."""
    try:
        return function()
    except (Exception, SystemExit) as error:
        _fail(spec, what, error)


def error_line(error: BaseException) -> str:
    """Returns an error's type and message in one line, without frames."""
    message = error.msg if isinstance(error, SyntaxError) else str(error)
    lines = _COLOR.sub("", message).splitlines()
    kept = " ".join(line for line in lines if not _FRAME.match(line))
    words = " ".join(kept.split())
    name = type(error).__name__
    return f"{name}: {words}" if words else name


def _names(spec: str) -> tuple[str, str]:
    module, _, name = spec.partition(":")
    if module.endswith(".py"):
        path = os.path.relpath(module.removesuffix(".py"))
        if path.startswith(os.pardir):
            path = os.path.basename(path)
        raise ValueError(
            f"--model names a module, not a file. Received: {spec!r}. "
            "Expected: the same without '.py', "
            f"'{path.replace(os.sep, '.')}:{name or 'function'}', in a folder "
            "where Python finds it."
        )
    if not module or not name or module.startswith("."):
        raise ValueError(
            f"--model names a module and a function in it. Received: {spec!r}. "
            "Expected: 'module:function', such as 'my_models:resnet'."
        )
    return module, name


def _imported(spec: str, module: str) -> Any:
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as error:
        # The missing module is the user's, or a package of it.
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(
            f"{error.name}."
        ):
            raise ValueError(
                f"--model {spec}: can't import {module!r}: {error}. Python "
                f"looked in {os.getcwd()} and in the folders of sys.path."
            ) from error
        _fail(spec, "the module", error)


def _check_takes_nothing(spec: str, function: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        # Some callables that are not written in Python have no signature.
        return
    try:
        signature.bind()
    except TypeError as error:
        raise ValueError(
            f"--model {spec}: the function takes arguments. Received: "
            f"{signature}, {error}. Expected: a function that can be called "
            "without arguments."
        ) from error


def _fail(spec: str, what: str, error: BaseException) -> NoReturn:
    raise ValueError(
        f"--model {spec}: {what} failed{_place(error)}, with "
        f"{error_line(error)}"
    ) from error


def _place(error: BaseException) -> str:
    """Returns the deepest frame of the user's code, or else of all."""
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return f" in {_shown(error.filename)}, line {error.lineno}"
    # The first frame is the call in this module.
    _, *frames = traceback.extract_tb(error.__traceback__)
    users_frames = [frame for frame in frames if _is_own(frame.filename)]
    if not (users_frames or frames):
        return ""
    last = (users_frames or frames)[-1]
    return f" in {_shown(last.filename)}, line {last.lineno}"


def _is_own(filename: str) -> bool:
    """Returns whether a file is neither Python's nor installed."""
    parts = filename.split(os.sep)
    return not (
        filename.startswith(("<frozen ", _STDLIB, *_package_folders()))
        or any(folder in parts for folder in _INSTALLED)
    )


def _package_folders() -> list[str]:
    imported = [sys.modules.get(name) for name in _PACKAGES]
    files = [getattr(module, "__file__", None) for module in imported]
    return [os.path.dirname(file) + os.sep for file in files if file]


def _shown(filename: str) -> str:
    """Returns a path, relative if it is below the working directory."""
    return filename.removeprefix(os.getcwd() + os.sep)
