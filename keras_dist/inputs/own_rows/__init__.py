"""Data of trainers of which each worker loads its own rows only.

Keras' adapter of the data is replaced. Every worker draws the rows of the
global batch, by the same sampler from the same random states, and loads those
of its own replicas.
"""
