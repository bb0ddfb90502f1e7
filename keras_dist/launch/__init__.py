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

__all__ = ["launch"]
