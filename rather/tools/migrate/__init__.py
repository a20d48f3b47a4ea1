"""Settings of other trainers -> our YAML, with a table of what became of each key."""

NAMES = ("trl", "llama-factory", "axolotl", "roll")
