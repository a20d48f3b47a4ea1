"""TRL's path trl.experimental.cpo."""

from rather.trl.configs import CPOConfig
from rather.trl.trainers import CPOTrainer

__all__ = ["CPOConfig", "CPOTrainer"]
