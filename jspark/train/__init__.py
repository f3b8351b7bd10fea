"""Training text written by the target itself, and the training of drafters on it."""
