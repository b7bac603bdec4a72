"""models optimize on the default model, whose weights were quantised before: 8 bits keep it."""

import json

import pytest

from localrag.cli import main

pytestmark = pytest.mark.model


@pytest.mark.long
def test_eight_bits_keep_the_model(home, model_path, capsys):
    assert main(["models", "optimize", str(model_path), "--type", "Q8_0", "--json", "--yes", "--min-speedup", "0"]) == 0
    found = json.loads(capsys.readouterr().out)
    (eight,) = found["candidates"]
    assert found["original"]["type"] == "Q4_1"
    assert found["original"]["quality"]["num_tokens"] >= 512
    assert 5 < found["original"]["quality"]["perplexity"] < 40  # that of a text that it can read
    assert eight["quality"]["mean_kl"] < 0.02
    assert eight["quality"]["top1_agreement"] > 0.9
    assert found["best"] == "Q8_0"
    (kept,) = (home / "models" / "optimized").glob("*.gguf")
    assert found["kept"]["path"] == str(kept)
