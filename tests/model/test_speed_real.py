"""What is expected of a model's speed before it was measured. How near a time limit is kept is measured by scripts/bench seconds."""

import pytest

from localrag.engine.loading import open_model

pytestmark = pytest.mark.model


def test_the_slopes_that_are_expected_are_near_those_that_are_learned(model_path):
    with open_model(model_path, name="smollm2-135m") as engine:
        assert engine.speed._prefill.prior_slope == pytest.approx(5e-4, rel=0.1)
        assert engine.speed._decode.prior_slope == pytest.approx(3.5e-4, rel=0.1)
