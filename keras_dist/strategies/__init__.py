"""The strategies; each class builds and validates a `Plan`."""
