"""Which evaluators there are, and which may be used."""

from __future__ import annotations

import pytest

from polar.evaluator.errors import UnknownEvaluator
from polar.evaluator.registry import BUILT_IN, load
from polar.schemas.catalog import EVALUATORS


def test_the_catalog_names_what_is_built_in() -> None:
    assert set(BUILT_IN) == set(EVALUATORS.names())
    assert all(load(name).version for name in BUILT_IN)


def test_an_outside_evaluator_must_be_allowed_by_name() -> None:
    own = "polar.evaluator.evaluators.command:Command"
    with pytest.raises(UnknownEvaluator, match="POLAR_EVALUATOR_ALLOW"):
        load(own)
    assert load(own, {own}).__name__ == "Command"


@pytest.mark.parametrize("name", ["no.such.module:Class", "json:NoSuchName", "nobody-offers-this"])
def test_what_cannot_be_loaded_says_so(name: str) -> None:
    with pytest.raises(UnknownEvaluator, match=r"cannot be loaded|no installed package"):
        load(name, {name})
