"""Reports on installed backends and their devices, without importing Keras.

Each backend is tried in a process of its own. A backend that is broken, or that
ends its process, is then a line of the report and not the end of the command.
"""
