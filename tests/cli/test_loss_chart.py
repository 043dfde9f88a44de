"""Curves as text, SVG and PNG."""

import xml.etree.ElementTree as ET

import pytest

from tinkex.cli import loss_chart


@pytest.mark.parametrize(
    ("low", "high", "about", "expected"),
    [
        (0, 4.4, 4, [0, 1, 2, 3, 4, 5]),
        (0, 6.1, 4, [0, 2, 4, 6, 8]),  # steps of 1 would be six, of 2 three
        (0, 0.001, 4, [0, 0.0002, 0.0004, 0.0006, 0.0008, 0.001]),
        (0, 0, 4, [0]),  # the loss is constant
    ],
)
def test_ticks_are_round_and_cover_the_curve(low, high, about, expected):
    assert loss_chart.ticks(low, high, about) == expected


def test_smoothing_starts_at_the_first_value_and_ends_near_the_last():
    values = [4.0, 2.0, *[1.0] * 20]
    smooth = loss_chart.smoothed(values)
    assert smooth[0] == pytest.approx(4.0)
    assert smooth[-1] == pytest.approx(1.0, abs=0.01)
    assert len(smooth) == len(values)


def test_a_falling_line_goes_from_corner_to_corner():
    assert loss_chart.as_text([4.0, 0.0], width=15, height=5, braille=False) == [
        "     4 |**",
        "     3 |  ****",
        "     2 |      ***",
        "     1 |         ****",
        "     0 |             **",
        "       +---------------",
        "        step 1   step 2",
    ]


@pytest.mark.parametrize("braille", [True, False])
@pytest.mark.parametrize("values", [[1.0], [0.0, 0.0], [3.0, 1.0, 2.0], [2.0] * 100])
def test_any_curve_fits_its_frame(values, braille):
    lines = loss_chart.as_text(values, width=40, height=6, braille=braille)
    assert len(lines) == 8
    assert max(len(line) for line in lines) <= 8 + 40
    text = "".join(lines)
    assert any(0x2800 < ord(char) < 0x2900 for char in text) if braille else "*" in text
    assert braille or text.isascii()


def test_the_svg_is_well_formed_and_has_a_dot_for_each_step():
    values = [4.0, 3.0, 1.5, 1.0]
    svg = ET.fromstring(loss_chart.as_svg(values, x_label="step", y_label="loss"))
    assert len(svg.findall("circle")) == 4
    titles = [title.text for title in svg.iter("title")]
    assert titles == ["step 1: 4.000", "step 2: 3.000", "step 3: 1.500", "step 4: 1.000"]
    heights = [float(circle.get("cy")) for circle in svg.findall("circle")]
    assert heights == sorted(heights)  # a falling loss goes down the page


def test_the_png_is_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "loss.png"
    loss_chart.write_png(path, [3.0, 2.0, 1.0], title="t", x_label="step", y_label="loss")
    assert path.read_bytes().startswith(b"\x89PNG\r\n")
