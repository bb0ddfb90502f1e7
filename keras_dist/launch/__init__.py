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

# The other modules start the workers of a job, watch over them, and end them:
#
# job.py          a job: the environment variables of its workers, their start
#                 again after a failure, and signals passed on to them
# addresses.py    the address of each worker
# group.py        all processes that were started together
# member.py       one process of a group, with all that it started
# failures.py     the failure that came first, and its report
# output.py       the workers' output: from pipes, to the screen and a report
# watcher.py      ends the workers of a launcher that was killed; guard.py too
# coordinator.py  the backend's service outside of the workers, where it has one
# call.py         a worker that calls a function: `keras_dist.launch(fn)`
#
# None imports Keras at module level, so that the launcher stays small: a
# framework would take hundreds of megabytes of memory, or memory of a GPU.
#
# A process that leaves its session (a daemon) is out of reach and not ended. On
# systems other than Linux, only the watcher ends the workers of a launcher that
# was killed with SIGKILL.

__all__ = ["launch"]
