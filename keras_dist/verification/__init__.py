"""`strategy.verify`: the numbers of one device, proved on a user's model.

Copies of the model, one of plain Keras and one under the strategy, start with
the same state and get the same batches; what they give is compared, in the
order in which a step computes it. The first thing that differs is named.
"""
