"""`fit` on several workers: agreement, backups, checks of the data."""
