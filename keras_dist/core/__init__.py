"""Data that everything else is made of: plans, devices, values, options."""
