"""The contract with tf.distribute, number by number, on each backend."""
