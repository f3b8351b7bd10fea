"""Model definitions: weights as Flax modules whose calls are pure functions of their arguments."""
