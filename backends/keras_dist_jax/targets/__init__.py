"""Programs for machines that are not here: described, compiled and measured."""
