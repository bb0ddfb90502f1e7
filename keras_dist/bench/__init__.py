"""`keras-dist bench`: our loops beside those of the framework itself.

Times on one machine say little about another, and on a busy one little about
itself. So all arms of a comparison run in one process, in turns, and what is
reported are ratios, next to the ratio of an arm to a second copy of itself.
"""
