"""What `keras-dist test` and `keras-dist info` do with Keras.

Each backend has a process of its own, `python -m keras_dist.launch.self_test`,
which tells what it sees and then does one job after another.
"""
