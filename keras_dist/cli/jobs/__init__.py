"""The part of each command that runs once Keras is imported."""
