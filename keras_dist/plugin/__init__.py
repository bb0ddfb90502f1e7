"""The interface between the front end and a backend."""
