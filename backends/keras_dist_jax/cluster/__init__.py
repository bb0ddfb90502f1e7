"""Several workers: how they start, meet, and learn that one is lost."""
