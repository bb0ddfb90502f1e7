"""`keras_dist.launch(fn)`: a function called on workers of this machine.

`python -m keras_dist.launch` is the command `keras-dist run`.

Example:

>>> def name():
...     import os
...     return os.environ["KERAS_DIST_WORKER_INDEX"]
>>> keras_dist.launch(name, workers=2)
['0', '1']
"""

from keras_dist.launch.function import launch

# No module imports Keras at module level, so that the launcher stays small: a
# framework would take hundreds of megabytes of memory, or memory of a GPU.
#
# A process that leaves its session (a daemon) is out of reach and not ended. On
# systems other than Linux, only the watcher ends the workers of a launcher that
# was killed with SIGKILL.

__all__ = ["launch"]
