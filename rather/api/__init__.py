"""Python entry points: DPOTrainer and the adapters for torch optimizers."""
