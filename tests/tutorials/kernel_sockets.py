"""A plugin of pytest: kernels of notebooks are talked to over files.

By default five ports are chosen that are free, and the kernel listens to them
some seconds later. Meanwhile other tests, that start processes, may have them.
"""

import os

from jupyter_client.manager import KernelManager

_make = KernelManager.__init__


def _over_files(self, *args, **kwargs):
    # The kernel has another working directory.
    files = os.path.abspath("kernel")
    _make(self, *args, transport="ipc", ip=files, **kwargs)


KernelManager.__init__ = _over_files
