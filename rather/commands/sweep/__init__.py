"""`rather sweep`: the same run for every combination of some values, with one pass of the reference for all."""
