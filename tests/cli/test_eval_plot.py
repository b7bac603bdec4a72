"""Shares drawn as a picture."""

from localrag.cli.evaluate import Bars, draw_bars


def test_it_is_a_picture(tmp_path):
    rows = [Bars(name, [0.5, 0.0, 1.0]) for name in ("hybrid", "keyword")]
    draw_bars(rows, ["nDCG", "Recall", "MRR"], tmp_path / "bars.png", title="a collection")
    data = (tmp_path / "bars.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert len(data) > 10_000


def test_intervals_are_drawn_too(tmp_path):
    rows = [Bars("ask", [0.5, 0.0, 1.0], [(0.3, 0.7), (1e-17, 0.2), (0.8, 1.0)])]
    for file, each in (("with.png", rows), ("without.png", [Bars("ask", rows[0].shares)])):
        draw_bars(each, ["a", "b", "c"], tmp_path / file, title="t")
    assert (tmp_path / "with.png").read_bytes() != (tmp_path / "without.png").read_bytes()
