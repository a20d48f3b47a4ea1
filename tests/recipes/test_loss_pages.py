"""The pages of the losses: one for each loss, with every number, and snippets that load."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from rather.config.load import config_from_dict
from rather.config.schema import LOSS_MODIFIERS, LOSS_NUMBERS
from rather.errors import ConfigError
from rather.losses.losses import LOSSES
from rather.losses.metrics import OF_A_LOSS, PER_PAIR, WITH_REFERENCE
from rather.losses.objective import DIVERGENCES, configure, from_config
from rather.recipes import list_recipes

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = DOCS / "losses"
NEEDED = {"pretrain": "model", "actor_train": {"data_args": {"file_name": "pairs.jsonl"}}}


def read(page: str) -> str:
    return (PAGES / page).read_text(encoding="utf-8")


def section(name: str) -> str:
    """The part of its task's page about one loss."""
    page = read(f"{LOSSES[name].task}.md")
    return page.split(f"\n## {name}\n")[1].split("\n## ")[0]


def written(default: float | bool | None) -> str:
    """A default as YAML writes it."""
    return (
        "not set"
        if default is None
        else str(default).lower()
        if isinstance(default, bool)
        else f"{default:g}"
    )


@pytest.mark.parametrize("name", LOSSES)
def test_page_and_index_name_the_loss_its_numbers_and_defaults(name: str) -> None:
    page, index, rule = section(name), read("index.md"), LOSSES[name]
    link = f"| [`{name}`]({rule.task}.md#{name})"
    row = next(line for line in index.splitlines() if line.startswith(link))
    assert "yes" in row.split("|")[2] if rule.reference else "no" in row.split("|")[2]
    for number, default in rule.numbers.items():
        assert f"| `{number}` | {written(default)} |" in page, (
            f"{name}: the default of {number} is missing"
        )
        assert f"`{number}`" in row
    foreign = set(LOSS_NUMBERS) - set(rule.numbers)
    assert not [number for number in foreign if f"| `{number}` |" in page]


@pytest.mark.parametrize("page", sorted(file.name for file in PAGES.glob("*.md")))
def test_snippets_load(page: str) -> None:
    for snippet in re.findall(r"^```yaml\n(.*?)^```", read(page), re.DOTALL | re.MULTILINE):
        config = config_from_dict({**NEEDED, **yaml.safe_load(snippet)})
        from_config(config)


def test_every_loss_page_has_a_snippet_of_its_own_loss() -> None:
    for name in LOSSES:
        first = re.search(r"^```yaml\n(.*?)^```", section(name), re.DOTALL | re.MULTILINE)
        assert first, f"{name} has no YAML"
        assert yaml.safe_load(first[1])["pref_loss"] == name


def can_take(name: str, modifier: str) -> bool:
    if modifier == "sync_ref_model":
        return LOSSES[name].reference
    value = {"f_divergence_type": "js", "ld_alpha": 0.5, "rpo_alpha": 1.0, "pref_ftx": 1.0}.get(
        modifier, True
    )
    try:
        configure([name], {}, modifiers={modifier: value})
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize("name", LOSSES)
def test_page_names_the_modifiers_that_the_loss_takes(name: str) -> None:
    told = re.search(
        r"\[Modifiers\]\(modifiers.md\):\s(.*?)\.$", section(name), re.DOTALL | re.MULTILINE
    )
    assert told
    all_of_them = {*LOSS_MODIFIERS, "sync_ref_model"} - {"f_alpha_divergence_coef"}
    able = {modifier for modifier in all_of_them if can_take(name, modifier)}
    assert set(re.findall(r"`(\w+)`", told[1])) == able | {"loss_weights"}


def test_modifiers_page_names_every_modifier() -> None:
    page = read("modifiers.md")
    named = (
        *LOSS_MODIFIERS,
        *DIVERGENCES,
        "loss_weights",
        "sync_ref_model",
        "ref_model_mixup_alpha",
        "weight",
    )
    assert not [name for name in (*named, "ref_model_sync_steps") if f"`{name}`" not in page]


def test_index_names_every_recipe() -> None:
    index = read("index.md")
    assert not [name for name in list_recipes() if f"`{name}`" not in index]


def test_metrics_page_names_every_metric() -> None:
    page = (DOCS / "metrics.md").read_text(encoding="utf-8")
    names = (*PER_PAIR, *WITH_REFERENCE, *OF_A_LOSS, "rewards/length_correlation")
    assert not [name for name in names if f"`{name}`" not in page]
