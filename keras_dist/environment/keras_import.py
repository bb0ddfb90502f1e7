"""The first import of Keras: what goes with it, and what to do if it fails."""

import sys
from collections.abc import Callable
from collections.abc import Sequence
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import NoReturn

from keras_dist.errors import BackendNotFoundError


def when_imported(set_up: Callable[[], None]) -> None:
    """Calls a function as soon as Keras is imported, now if it is already."""
    if "keras" in sys.modules:
        set_up()
    else:
        sys.meta_path.insert(0, _Finder(set_up))


class _Finder(MetaPathFinder):
    """Finds Keras as the other finders do, and wraps its execution."""

    def __init__(self, set_up: Callable[[], None]) -> None:
        self.set_up = set_up
        self.is_searching = False

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if fullname != "keras" or self.is_searching:
            return None
        self.is_searching = True
        try:
            spec = find_spec(fullname)
        finally:
            self.is_searching = False
        if spec is not None and spec.loader is not None:
            execute = partial(self._execute, spec.loader.exec_module)
            # importlib calls what the instance has.
            spec.loader.exec_module = execute  # type: ignore[method-assign]
        return spec

    def _execute(
        self, execute: Callable[[ModuleType], None], module: ModuleType
    ) -> None:
        try:
            execute(module)
        except (ImportError, ValueError) as error:
            _explain(error)
        if self in sys.meta_path:
            # If it raises an error, the next import of Keras does too.
            self.set_up()
            sys.meta_path.remove(self)


def _explain(error: Exception) -> NoReturn:
    """Raises what to do instead, or the error itself if it is another one."""
    # Imported late: only a failed import needs it.
    from keras_dist.environment import packages

    known = packages.backends()
    installed = [backend.name for backend in known if backend.is_installed]
    name, source = packages.picked_by_keras()
    name = name or "tensorflow"
    if name in installed:
        raise error
    names = ", ".join(backend.name for backend in known)
    choice = (installed or [known[0].name])[0]
    install = "" if installed else f"`{known[0].fix}`, and "
    raise BackendNotFoundError(
        f"Keras can't be imported with the backend '{name}' ({source}): "
        f"{error} "
        f"Installed: {', '.join(installed) or 'none'} of {names}. Do this: "
        f"{install}set KERAS_BACKEND={choice} before Keras is imported, in "
        "the shell or in `os.environ`."
    ) from None  # whose many lines would hide these
