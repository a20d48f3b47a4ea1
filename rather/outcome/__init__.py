"""What a run did to a model besides its loss: what it forgot, and whether its answers are better."""
