"""The first import of Keras, with an error that explains a failure."""

from importlib.util import find_spec
from typing import NoReturn

from keras_dist.errors import BackendNotFoundError


def _explain(error: Exception) -> NoReturn:
    """Raises `BackendNotFoundError` if Keras' backend is not installed.

    Otherwise it raises the error itself.
    """
    # A lazy import: it is only needed where Keras can't be imported.
    from keras_dist_cli.inspection import packages

    known = packages.backends()
    installed = [each.name for each in known if each.is_installed]
    name, source = packages.picked_by_keras()
    name = name or "tensorflow"
    if find_spec("keras") is None or name in installed:
        raise error
    names = ", ".join(each.name for each in known)
    choice = (installed or [known[0].name])[0]
    install = "" if installed else f"`{known[0].fix}`, and "
    raise BackendNotFoundError(
        f"Keras can't be imported with the backend '{name}' ({source}): "
        f"{error} "
        f"Installed: {', '.join(installed) or 'none'} of {names}. Do this: "
        f"{install}set KERAS_BACKEND={choice} before Keras is imported, in "
        "the shell or in `os.environ`."
    ) from None  # the long traceback of the cause would hide this message


try:
    import keras  # noqa: F401
except (ImportError, ValueError) as error:
    _explain(error)
