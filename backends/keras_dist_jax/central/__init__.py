"""Central storage: variables on devices of their own, with their updates."""
