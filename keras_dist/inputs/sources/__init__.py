"""Sources: readers of users' data, one module for each kind of data."""
