"""The losses, the objective built from them, and their metrics."""

from rather.losses.losses import loss

__all__ = ["loss"]
