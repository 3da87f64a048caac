"""HTTP in and out of the engine. `parse` and `encode` of each protocol are pure functions."""
