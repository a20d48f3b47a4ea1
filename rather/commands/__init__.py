"""The commands. Modules that `rather.cli` imports at once do not import torch."""
