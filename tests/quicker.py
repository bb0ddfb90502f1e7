"""Frameworks that compile small programs sooner.

Tests compile thousands of programs and run each a few times: most of their
time would go into making these fast. TensorFlow does that for the smoke tests
still, and in the processes that tests start.
"""

import functools
import threading

import keras

BACKEND = keras.backend.backend()
# What was written in a context stays there as long as it does.
PROGRAMS_A_CONTEXT = 200


def compile_less():
    """Leaves out what only pays for programs that run for long."""
    share_contexts()
    if BACKEND == "tensorflow":
        _keep_graphs()


def share_contexts():
    """Lets JAX write many programs in one context of MLIR, not each in one."""
    if BACKEND != "jax":
        return
    # It loads dialects into each: a third of a small program's time.
    from jax._src.interpreters import mlir

    if not isinstance(mlir.make_ir_context, Shared):
        mlir.make_ir_context = Shared(mlir.make_ir_context, PROGRAMS_A_CONTEXT)


def _keep_graphs():
    # Grappler rewrites each traced function before its first call.
    import tensorflow as tf

    tf.config.optimizer.set_experimental_options(
        {"disable_meta_optimizer": True}
    )


class Shared:
    """A function that gives what it made several times, then makes another.

    Args:
        make: Callable without arguments.
        times: Integer, how often each is given.
    """

    def __init__(self, make, times):
        functools.update_wrapper(self, make)
        self._make = make
        self._times = times
        self._left = 0
        self._lock = threading.Lock()

    def __call__(self):
        with self._lock:
            if not self._left:
                self._made = self._make()
                self._left = self._times
            self._left -= 1
            return self._made
