"""The table of mutations (tests/mutations.py) matches the code and the tests."""

from __future__ import annotations

import ast

import pytest

from tests.mutations import MUTATIONS, ROOT, Mutation, occurrences


def test_there_are_enough_and_each_is_different() -> None:
    assert len(MUTATIONS) >= 25
    assert len({(each.file, each.before, each.after) for each in MUTATIONS}) == len(MUTATIONS)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.what)
def test_a_mutation_can_be_applied_and_its_tests_exist(mutation: Mutation) -> None:
    assert occurrences(mutation) == 1, mutation.file
    assert mutation.after != mutation.before
    changed = (ROOT / mutation.file).read_text().replace(mutation.before, mutation.after)
    ast.parse(changed)
    for test in mutation.tests:
        file, _, name = test.partition("[")[0].partition("::")
        tree = ast.parse((ROOT / file).read_text())
        assert name in {each.name for each in tree.body if isinstance(each, ast.FunctionDef)}, test
