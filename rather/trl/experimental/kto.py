"""TRL's path trl.experimental.kto."""

from rather.trl.configs import KTOConfig
from rather.trl.trainers import KTOTrainer

__all__ = ["KTOConfig", "KTOTrainer"]
