"""Variables' arrays: their homes, and how programs take and give them."""
