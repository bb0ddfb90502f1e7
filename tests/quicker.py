"""Frameworks that start programs sooner and run them no differently.

Tests trace and compile thousands of programs and run each a few times, and
much of their time would go into making them fast. Programs that tests start in
processes of their own run as users' programs do.
"""

import functools

import keras


def compile_less():
    """Leaves out what only pays for programs that run for long."""
    if keras.backend.backend() == "tensorflow":
        # Grappler rewrites each traced function before its first call.
        import tensorflow as tf

        tf.config.optimizer.set_experimental_options(
            {"disable_meta_optimizer": True}
        )
    elif keras.backend.backend() == "jax":
        import jax
        from jax._src.interpreters import mlir

        # Programs don't say which line made an operation, and are made in one
        # context: a new one for each takes a tenth of the time.
        jax.config.update("jax_traceback_in_locations_limit", 0)
        mlir.make_ir_context = _kept(mlir.make_ir_context)


def _kept(make_context):
    """Makes one context, and more for programs inside of which others are."""
    from jax._src.lib.mlir import ir

    kept = functools.cache(make_context)
    return lambda: kept() if ir.Context.current is None else make_context()
