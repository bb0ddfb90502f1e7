"""Variables and optimizers' sharded state, over all devices."""
