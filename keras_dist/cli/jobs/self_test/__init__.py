"""The parts of `keras-dist test` and `keras-dist info` that use Keras.

`python -m keras_dist.cli.jobs.self_test` is the process of one backend. It
describes what it sees and then does one job after another.
"""
