"""Arrays on devices: layouts of devices, batches and per-replica values."""
