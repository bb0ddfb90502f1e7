"""Programs on top of strategies: summaries, preemption, the user's model."""
