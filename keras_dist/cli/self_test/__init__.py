"""`keras-dist test`: the command, its trials, and their results."""
