"""The ledger of programs compiled as users compile them; the other tests leave out XLA's expensive passes."""

from collections.abc import Generator

import jax
import pytest

from bench.proof.prove import proof_config
from shared.placement.strategies import STRATEGIES
from tests.bench.ledger.test_predictions import compiled, expected, sent

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def optimised() -> Generator[None]:
    compiled.cache_clear()
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)
    compiled.cache_clear()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_optimised_step_sends_what_the_strategy_table_predicts(strategy: str):
    config = proof_config("float32", strategy)
    assert sent(config, "explicit", 8) == expected(config, "explicit", 8)


@pytest.mark.parametrize("strategy", ["data_parallel", "tensor_parallel", "ulysses"])
def test_an_optimised_auto_step_too(strategy: str):
    config = proof_config("float32", strategy)
    assert sent(config, "auto", 8) == expected(config, "auto", 8)
