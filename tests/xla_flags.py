"""The flags with which XLA compiles small programs in less time and memory.

Most of the tests' time on JAX goes into that.
"""

import importlib.util
import mmap
import pathlib

_FLAGS = {
    "xla_backend_optimization_level": "0",
    "xla_cpu_use_fusion_emitters": "false",
    "xla_cpu_parallel_codegen_split_count": "1",
}


def xla_flags():
    """A value for XLA_FLAGS: those that the installed JAX has, if there is one.

    XLA ends a process that has been given another one.
    """
    found = importlib.util.find_spec("jaxlib")
    libraries = [
        path
        for folder in (found.submodule_search_locations if found else ())
        for path in pathlib.Path(folder).glob("libjax_common.*")
    ]
    return " ".join(
        f"--{name}={value}"
        for name, value in _FLAGS.items()
        if all(_has_text(path, name) for path in libraries)
    )


def _has_text(path, text):
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        return content.find(b"\0" + text.encode() + b"\0") >= 0
