"""DPOPipeline: the training loop and what happens around it."""
