"""An optimizer's state in parts, one for each replica."""
