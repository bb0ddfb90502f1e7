"""Writes the tutorials' notebooks with their outputs, and README's picture."""
