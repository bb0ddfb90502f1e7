"""Keras without what it imports for a wrapper and for plots.

Python runs this file at the start of each process that a test starts: the
folder is on their path. Keras imports scikit-learn and matplotlib wherever
they are installed, which takes a process as long as a framework does. Whoever
else imports the two gets them.
"""

import sys

LEFT_OUT = {"sklearn", "matplotlib"}


def _importer():
    """The name of the module whose import statement is being run."""
    frame = sys._getframe(2)
    while frame and frame.f_globals.get("__name__", "").startswith("importlib"):
        frame = frame.f_back
    return frame.f_globals.get("__name__", "") if frame else ""


class NotForKeras:
    """A finder that comes first, and finds nothing."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name in LEFT_OUT and _importer().startswith("keras.src."):
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)
        return None


sys.meta_path.insert(0, NotForKeras)
