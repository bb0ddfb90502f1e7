"""Facts of the process that are known without Keras."""
