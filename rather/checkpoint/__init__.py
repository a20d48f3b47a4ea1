"""Checkpoints: atomic, hashed, free of pickle."""
