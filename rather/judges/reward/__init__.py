"""A reward model: the score that it gives to an answer after its prompt."""

from __future__ import annotations

from rather.config.redaction import public_url
from rather.errors import ConfigError
from rather.files import text_sha
from rather.judges.cache import VerdictCache
from rather.judges.judge import JUDGES, Answers, Judge, JudgeOptions, judge
from rather.tracking.json_lines import strict_json


@judge("reward")
class RewardJudge(Judge):
    """Loads the model when an answer is not in the cache."""

    label = "a reward model (a folder or hub name)"
    takes = ("trust",)
    is_fallback = True

    def __init__(self, name: str, options: JudgeOptions) -> None:
        super().__init__(name, options)
        from rather.run_folder.model_source import weights_of  # imports torch

        self.weights = weights_of(name, options.trust)
        if not self.weights.is_reward:
            labels = [kind.label for kind in JUDGES.values() if not kind.is_fallback]
            raise ConfigError(
                f"--with {name}: is not a reward model; train one with task: reward, or name "
                f"{' or '.join(labels)}."
            )

    @classmethod
    def check(cls, name: str, options: JudgeOptions) -> None:
        if public_url(name) != name:  # not shown: it may hold a password
            raise ConfigError("--with: write the address of a server as http://HOST:PORT.")
        super().check(name, options)

    def scores(self, answers: Answers) -> list[float]:
        """Return the score of each answer; those that the cache has are not computed again."""
        cache = VerdictCache(self.weights.digest(), float)
        prompt_columns = ("prompt", "system", "tools", "chat_template_kwargs")
        rows = [{name: q.row.get(name) for name in prompt_columns} for q, _ in answers]
        keys = [
            text_sha(strict_json([row, answer]))
            for row, (_, answer) in zip(rows, answers, strict=True)
        ]
        missing = {key: i for i, key in enumerate(keys) if key not in cache}
        if missing:
            from rather.judges.reward.scores import reward_scores

            indices = list(missing.values())
            questions = [(rows[i], answers[i][1], answers[i][0].place) for i in indices]
            for key, score in zip(missing, reward_scores(self.weights, questions), strict=True):
                cache.add(key, score)
        return [cache[key] for key in keys]

    def digest(self) -> str:
        return self.weights.digest()
