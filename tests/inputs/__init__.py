"""Distributed input."""
