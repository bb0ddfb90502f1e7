"""What is installed and what it sees, without Keras in this process.

A backend that is broken, or that ends its process, is then something to tell
and not the end of the command.
"""
