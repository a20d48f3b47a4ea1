"""What a run did to a model besides its loss: what it forgot, whether its answers are better."""
