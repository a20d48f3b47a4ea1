"""DPOConfig: the keys of schema.py, with unset ones filled in and impossible ones refused."""

from __future__ import annotations

from typing import Any, Self

from pydantic import ModelWrapValidatorHandler, ValidationError, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from rather.config import checks, inherit
from rather.config.keys import field_problems
from rather.config.schema import RunConfig
from rather.config.strategies import data_parallel, reference_is_policy
from rather.errors import ConfigError

# The validation context of a config that must name its model and pairs. The Python API is given
# both.
FOR_A_RUN = {"named": ("model", "pairs")}
# The same for a config that need not; without a context, errors are raised as a ConfigError.
FOR_A_PART: dict[str, Any] = {}


class DPOConfig(RunConfig):
    """A whole run."""

    @model_validator(mode="wrap")
    @classmethod
    def _validate(
        cls, data: Any, handler: ModelWrapValidatorHandler[Self], info: ValidationInfo
    ) -> Self:
        """Fill in unset keys and check combinations. `DPOConfig(...)` raises a ConfigError.

        With a context, errors stay pydantic's: load.py adds the lines of a file to them.
        """
        try:
            config = handler(data)
        except ValidationError as error:
            if info.context is not None or not isinstance(data, dict):
                raise
            wrong = field_problems(error, data).items()
            texts = [f"{'.'.join(names)}: {text}" for names, text in wrong]
            raise ConfigError(texts) from error
        problems = config._complete_and_check(named=info.context is FOR_A_RUN)
        texts = [f"{key}: {text}" for key, text in problems]
        if texts and info.context is None:
            raise ConfigError(texts)
        if texts:
            values = {"text": "\n".join(texts), "problems": problems}
            raise PydanticCustomError("cross_field", "{text}", values)
        return config

    def _complete_and_check(self, *, named: bool) -> list[tuple[str, str]]:
        """Fill in unset keys; return the problems. `named`: model and pairs must be there."""
        self._followed.update(inherit.complete(self))
        return [*checks.problems(self), *(checks.missing(self) if named else ())]

    @property
    def reference_is_policy(self) -> bool:
        """Whether the policy without its adapter, or with its initial one, is the reference."""
        return reference_is_policy(self)

    @property
    def keeps_start(self) -> bool:
        """Whether the reference is the initial adapter, of which the policy keeps a copy."""
        has_start = self.reference.model_args.adapter_name_or_path is not None
        return self.reference_is_policy and (has_start or self.actor_train.model_args.changes_base)

    @property
    def tokens_per_step(self) -> int:
        """Return the most tokens of one optimizer step."""
        return self.global_batch() * self.sequence_length

    def global_batch(self, dp: int | None = None) -> int:
        """Return the pairs of one optimizer step, for the policy's own dp degree or another."""
        training = self.actor_train.training_args
        sizes = training.per_device_train_batch_size * training.gradient_accumulation_steps
        return self.train_batch_size or (dp or data_parallel(self.actor_train)) * sizes
