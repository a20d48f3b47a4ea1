"""`rather demo`: from pairs to an aligned model on a laptop, in about a minute."""
