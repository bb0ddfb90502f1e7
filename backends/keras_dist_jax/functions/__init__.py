"""Compiled functions: traced with cells for variables, on one device or all."""
