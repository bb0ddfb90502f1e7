"""What the `keras-dist` commands do, once the backend is chosen."""
