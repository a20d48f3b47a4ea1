"""What may be wrong with a run, told while it runs: in health.jsonl, once on the console, and by `rather health`."""
