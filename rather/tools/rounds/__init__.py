"""`rather rounds`: generate answers, judge them, train on the pairs, evaluate, and repeat."""
