"""Variables' arrays: their storage, and how programs take and give them."""
