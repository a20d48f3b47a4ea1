"""Judges of answers: a rule, a reward model, a model on a server. Each is one file in this folder."""
