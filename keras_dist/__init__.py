"""tf.distribute's programming model for Keras 3, on every backend.

`__init__.pyi` lists the public names and the modules that they come from. A
name is loaded on its first use, so that `import keras_dist` loads neither
Keras nor a framework: the command line picks a backend after it.
"""

import lazy_loader

from keras_dist.environment import keras_import

__version__ = "0.1.0"
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

keras_import.prepare()
