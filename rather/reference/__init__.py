"""Log-probs of the frozen reference model, computed once and cached."""
