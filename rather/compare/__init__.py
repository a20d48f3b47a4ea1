"""`rather compare-losses`: one forward pass of policy and reference, then every loss on the same log-probs."""
