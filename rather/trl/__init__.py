"""TRL's configs and trainers over Rather: `from rather.trl import DPOConfig, DPOTrainer`.

A script that uses TRL 1.16 runs with these imports and gives TRL's numbers.
Helpers such as ModelConfig, ScriptArguments, TrlParser and get_peft_config stay imported from trl.
"""

from rather.trl.configs import (
    CPOConfig,
    DPOConfig,
    KTOConfig,
    ORPOConfig,
    RewardConfig,
    SFTConfig,
)
from rather.trl.trainers import (
    CPOTrainer,
    DPOTrainer,
    KTOTrainer,
    ORPOTrainer,
    RewardTrainer,
    SFTTrainer,
)

__all__ = [
    "CPOConfig", "CPOTrainer", "DPOConfig", "DPOTrainer", "KTOConfig", "KTOTrainer", "ORPOConfig",
    "ORPOTrainer", "RewardConfig", "RewardTrainer", "SFTConfig", "SFTTrainer",
]  # fmt: skip
