"""The first import of Keras, which says what to do where it can't work."""

import json
import os
import pathlib
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import NoReturn

from keras_dist.errors import BackendNotFoundError


def _explain(error: Exception) -> NoReturn:
    """Raises what to do instead.

    Raises:
        BackendNotFoundError: If the backend that Keras takes is none of ours,
            or is not installed.
        Exception: The error itself, if it is about something else.
    """
    known = sorted(e.name for e in entry_points(group="keras_dist.backends"))
    installed = [name for name in known if find_spec(name)]
    name, source = _backend()
    if find_spec("keras") is None or name in installed:
        raise error
    choice = (installed or known)[0]
    install = "" if installed else f"`pip install 'keras-dist[{choice}]'`, and "
    raise BackendNotFoundError(
        f"Keras can't be imported with the backend '{name}', which it takes "
        f"from {source}. Installed: {', '.join(installed) or 'none'} of "
        f"{', '.join(known)}. Do this: {install}set KERAS_BACKEND={choice} "
        "before Keras is imported, in the shell or in `os.environ`."
    ) from error


def _backend() -> tuple[str, str]:
    """The backend that Keras takes, and who says so."""
    wanted = os.environ.get("KERAS_BACKEND")
    if wanted:
        return wanted, "KERAS_BACKEND"
    home = os.environ.get("KERAS_HOME") or pathlib.Path.home() / ".keras"
    path = pathlib.Path(home, "keras.json")
    if path.exists():
        wanted = json.loads(path.read_text()).get("backend")
        if wanted:
            return str(wanted), str(path)
    return "tensorflow", "its own default, as KERAS_BACKEND is not set"


try:
    import keras  # noqa: F401
except (ImportError, ValueError) as error:
    _explain(error)
