"""What `keras_dist.summary` finds, and how it is shown."""
