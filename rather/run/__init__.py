"""The rooms around the loop: its steps, the reference it asks, its evaluation, its checkpoints and its times."""
