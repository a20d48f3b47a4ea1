"""TRL's path trl.experimental.orpo."""

from rather.trl.configs import ORPOConfig
from rather.trl.trainers import ORPOTrainer

__all__ = ["ORPOConfig", "ORPOTrainer"]
