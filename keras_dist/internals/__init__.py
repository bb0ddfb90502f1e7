"""The one door to Keras' private names."""
