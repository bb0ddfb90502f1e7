"""Benchmarks of `keras-dist bench`: our loops beside those of the framework.

Times on one machine say little about another, and times on a busy machine say
little at all. So all arms of a comparison run in one process and take turns.
Ratios are reported, next to the ratio of an arm to a second copy of itself.
"""
