"""Steps of Keras' trainer, compiled for all devices, with its state on loan."""
