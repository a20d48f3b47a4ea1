"""Every recipe loads and names a loss that exists; the commands list, show and copy them."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from rather.config.load import load_config
from rather.config.run_config import DPOConfig
from rather.errors import ConfigError
from rather.losses.losses import LOSSES
from rather.losses.objective import from_config
from rather.recipes import copy_recipe, find_recipe, list_recipes
from tests.commands.conftest import refusal, succeed

RECIPES = list_recipes()


def text_of(name: str) -> str:
    return find_recipe(name).read_text(encoding="utf-8")


@cache
def config_of(name: str) -> DPOConfig:
    return load_config(find_recipe(name), check_paths=False)


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_loads_and_its_objective_is_built(recipe: str) -> None:
    config = config_of(recipe)
    objective = from_config(config)
    assert objective.terms
    assert config.exp_name == recipe  # a copy takes the name of its file instead
    assert config.actor_train.training_args.learning_rate < 1e-4
    assert re.match(r"# \w", text_of(recipe)), "the first line is the title"


def test_every_loss_has_a_recipe() -> None:
    used = {name for recipe in RECIPES for name in config_of(recipe).loss_names}
    assert used == set(LOSSES)


@pytest.mark.parametrize(
    ("name", "beta", "gamma", "learning_rate"),
    [
        ("simpo-mistral-base", 2.0, 1.6, 3e-7),
        ("simpo-mistral-instruct", 2.5, 0.25, 5e-7),
        ("simpo-llama3-base", 2.0, 1.0, 6e-7),
        ("simpo-llama3-instruct", 2.5, 1.375, 1e-6),
        ("simpo-llama3-instruct-v0.2", 10.0, 3.0, 1e-6),
        ("simpo-gemma2", 10.0, 5.0, 8e-7),
    ],
)
def test_simpo_has_the_numbers_of_its_authors(
    name: str, beta: float, gamma: float, learning_rate: float
) -> None:
    config = config_of(name)
    assert config.beta == beta
    assert config.beta * (config.gamma_beta_ratio or 0) == pytest.approx(gamma)
    assert config.actor_train.training_args.learning_rate == learning_rate
    assert config.global_batch() == 128


def test_discopop_falls_at_zero_margin() -> None:
    """With the paper's temperature the loss rises there: training would start in the wrong direction."""
    import torch

    from rather.data.batch import PairLogps

    config = config_of("discopop")

    def slope(tau: float) -> float:
        policy = torch.zeros(1, 2, dtype=torch.float64, requires_grad=True)
        x = PairLogps(policy, torch.zeros(1, 2, dtype=torch.float64), torch.ones(1, 2))
        loss = LOSSES["discopop"].function(x, beta=config.beta, discopop_tau=tau)
        return float(torch.autograd.grad(loss.sum(), policy)[0][0, 0])

    assert config.discopop_tau is not None
    assert slope(config.discopop_tau) < 0 < slope(0.05)


def test_unknown_recipe_names_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match="unknown recipe 'simpo-lama3-base'; did you mean 'simpo-llama3-base'"
    ):
        text_of("simpo-lama3-base")
    with pytest.raises(ConfigError, match=r"known: .*dpo, .*orpo"):
        text_of("zzzz")


def test_copy_never_overwrites_unless_forced(tmp_path: Path) -> None:
    target = copy_recipe("ipo", tmp_path / "mine.yaml")
    assert target.read_text(encoding="utf-8") == text_of("ipo")
    target.write_text("mine")
    with pytest.raises(ConfigError, match=r"mine\.yaml: already exists; .*--force"):
        copy_recipe("dpo", target)
    assert target.read_text() == "mine"
    copy_recipe("dpo", target, force=True)
    assert target.read_text(encoding="utf-8") == text_of("dpo")
    assert copy_recipe("orpo", tmp_path) == tmp_path / "orpo.yaml"
    with pytest.raises(ConfigError, match="cannot be written"):
        copy_recipe("orpo", tmp_path / "nowhere" / "orpo.yaml")


def test_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    listed = succeed("recipes", "list").output
    assert all(re.search(rf"^ {re.escape(recipe)} ", listed, re.MULTILINE) for recipe in RECIPES)
    assert succeed("recipes", "show", "dpo").output == text_of("dpo")
    succeed("recipes", "copy", "dpo")
    assert (tmp_path / "dpo.yaml").exists()
    assert "--force" in refusal(2, "recipes", "copy", "dpo")
    succeed("recipes", "copy", "dpo", "--force")
