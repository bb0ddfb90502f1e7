"""`strategy.verify`, which compares training on a strategy with one device."""
