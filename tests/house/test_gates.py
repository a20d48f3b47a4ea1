"""Limits on the clarity of the package: circles, complexity, names, and who holds the whole config."""

from __future__ import annotations

from tests.house import gates

MOST_COMPLEX = 20
MOST_GENERIC = 0.04  # of all names that are bound
MOST_HOLDERS = 37  # of the whole config


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert not gates.circles()


def test_no_function_is_too_complex() -> None:
    complexities = gates.complexities()
    assert not [name for name, value in complexities.items() if value > MOST_COMPLEX]


def test_few_names_say_nothing() -> None:
    generic, _ = gates.bound_names()
    assert gates.generic_share() <= MOST_GENERIC, generic.most_common(20)


def test_few_parts_hold_the_whole_config() -> None:
    holders = gates.config_holders()
    assert len(holders) <= MOST_HOLDERS, "\n".join(holders)


def test_each_measure_sees_what_it_measures() -> None:
    source = """
def answer(config: DPOConfig, x):
    found = [y for y in x if y and x]
    return 1 if found else 2
"""
    function = gates.ast.parse(source).body[0]
    assert isinstance(function, gates.ast.FunctionDef)
    assert gates.complexity(function) == 1 + 2 + 1 + 1  # comprehension, `and`, ternary
    argument = function.args.args[0]
    for name in ("DPOConfig", "LossKeys"):  # itself, and a base class
        annotation = gates.ast.Name(name)
        assert gates._is_config("data", argument.arg, annotation)
    assert not gates._is_config("data", argument.arg, gates.ast.Name("PairBatch"))
