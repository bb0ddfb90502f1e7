"""Frameworks without what tests need them for least, to start sooner.

Python runs this file at the start of each process that a test starts: the
folder is on their path. Keras imports scikit-learn and matplotlib wherever
they are installed, and PyTorch's compiler for one of its functions, which
takes a process as long as the framework does. Whoever else imports the first
two gets them, and whoever compiles gets the compiler.
"""

import importlib
import importlib.machinery
import sys
import types

import own_ports
import without  # noqa: F401  (hides what a run must not see)

LEFT_OUT = {"sklearn", "matplotlib"}
COMPILER = "torch._dynamo"


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


class Compiler(types.ModuleType):
    """Stands for PyTorch's compiler until it is asked for more than this."""

    @staticmethod
    def disable(fn=None, recursive=True, **kwargs):
        """Marks nothing: there is no compiler."""
        return (lambda each: each) if fn is None else fn

    def __getattr__(self, name):
        # `inspect` asks every module for its file, whoever is being imported.
        if not LaterCompiler.is_ready or name == "__file__":
            raise AttributeError(name)
        LaterCompiler.is_wanted = True
        if sys.modules.get(COMPILER) is self:
            del sys.modules[COMPILER]
        return getattr(importlib.import_module(COMPILER), name)


class LaterCompiler:
    """Finds the stand-in, once."""

    is_ready = False
    is_wanted = False

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name != COMPILER or cls.is_wanted:
            return None
        return importlib.machinery.ModuleSpec(name, cls)

    @staticmethod
    def create_module(spec):
        return Compiler(spec.name)

    @classmethod
    def exec_module(cls, module):
        cls.is_ready = True


sys.meta_path[:0] = [NotForKeras, LaterCompiler, own_ports.OwnPorts]
