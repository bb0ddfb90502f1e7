"""JAX's programs: read, and edited where a device or compiler is at fault."""
