"""The executors: what the front end asks of a strategy's devices."""
