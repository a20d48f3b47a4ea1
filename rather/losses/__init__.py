"""The losses, the objective built from them, and their metrics."""

from rather.losses.losses import loss
from rather.losses.own import metric

__all__ = ["loss", "metric"]
