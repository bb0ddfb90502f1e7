"""The strategies: each is the plan that it makes."""
