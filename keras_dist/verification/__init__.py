"""`strategy.verify`, which compares training on a strategy with one device.

Two copies of the user's model, one of plain Keras and one under the strategy,
start with the same state and get the same batches. Their results are compared
in the order in which a step computes them, and the first difference is named.
"""
