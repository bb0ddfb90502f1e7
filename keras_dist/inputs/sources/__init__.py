"""Sources: one file a kind of data that people have."""
