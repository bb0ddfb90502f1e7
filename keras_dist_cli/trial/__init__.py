"""What `keras-dist test` tries, and what comes of it."""
