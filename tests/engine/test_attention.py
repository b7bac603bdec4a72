"""The faster attention kernel is measured once and kept."""

import json

from localrag.engine import attention
from localrag.engine.threads import ThreadGovernor


def test_what_was_measured_is_kept_and_asked_again(tmp_path):
    home = tmp_path / "home"
    chosen = attention.flash_attention(home, ThreadGovernor(1))
    kept = json.loads((home / "attention.json").read_text())
    assert kept["flash_attention"] is chosen is (kept["flash_s"] <= kept["plain_s"] * 1.05)
    (home / "attention.json").write_text(json.dumps({**kept, "flash_attention": not chosen}))
    assert attention.flash_attention(home, ThreadGovernor(1)) is not chosen  # it is read, not measured again


def test_a_measurement_of_another_machine_or_a_damaged_one_is_taken_anew(tmp_path):
    governor = ThreadGovernor(1)
    for content in ("", "{", "[]", "[" * 100_000, '{"for": "elsewhere", "flash_attention": true}'):
        (tmp_path / "attention.json").write_text(content)
        assert attention.kept_choice(tmp_path, governor) is None
    chosen = attention.flash_attention(tmp_path, governor)
    assert attention.kept_choice(tmp_path, governor) is chosen


def test_a_home_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "file").write_text("")
    assert attention.flash_attention(tmp_path / "file" / "home", ThreadGovernor(1)) in {True, False}


def test_the_thin_model_is_a_sound_file(tmp_path):
    path = tmp_path / "thin.gguf"
    attention._write_thin_model(path)
    seconds = attention.measure(1)
    assert set(seconds) == {True, False}
    assert all(0 < each < 60 for each in seconds.values())
    assert path.stat().st_size < 2_000_000
