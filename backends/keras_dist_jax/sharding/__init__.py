"""Variables and optimizers' state in parts, over all devices."""
