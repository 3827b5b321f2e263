"""The table of a figure against the numbers that were drawn."""

import csv
import io

import numpy as np
from matplotlib.figure import Figure

from leakbound_reproductions.figure_values import table


def rows(figure):
    return list(csv.DictReader(io.StringIO(table(figure))))


def numbers(found, *names):
    return np.array([[float(row[name]) for name in names] for row in found])


def test_lines_with_intervals_and_without():
    figure = Figure()
    left, right = figure.subplots(1, 2)
    x, y = np.array([1.0, 2, 3]), np.array([5.0, 4, 9])
    left.errorbar(x, y, [[1, 1, 2], [0.5, 1, 3]], label="up", capsize=3, marker="o")
    left.axhline(2)
    left.axvline(1)
    left.set(title="left", xscale="log")
    right.errorbar(x, y, xerr=[[0.1, 0.2, 0.3], [0.3, 0.2, 0.1]], label="along")
    right.plot(x, 2 * y)
    right.set_ylabel("height")
    found = rows(figure)
    up = [row for row in found if row["panel"] == "left"]
    assert {row["series"] for row in up} == {"up"}
    below, above = np.array([1, 1, 2]), np.array([0.5, 1, 3])
    expected = np.stack([x, y, y - below, y + above], 1)
    assert np.allclose(numbers(up, "x", "y", "low", "high"), expected)
    along = [row for row in found if row["series"] == "along"]
    near, far = np.array([0.1, 0.2, 0.3]), np.array([0.3, 0.2, 0.1])
    assert np.allclose(numbers(along, "low", "high"), np.stack([x - near, x + far], 1))
    plain = [row for row in found if row["panel"] == "height" and not row["series"]]
    assert np.allclose(numbers(plain, "x", "y"), np.stack([x, 2 * y], 1))
    assert len(found) == 9


def test_bars_and_surfaces():
    figure = Figure()
    bars, surface = figure.subplots(1, 2)
    bars.bar(range(2), [3.0, 4.0], label="noise")
    bars.set_xticks(range(2), ["first\n9", "second\n4"])
    x, y = np.array([1.0, 2]), np.array([0.5, 1.5, 2.5])
    shade = np.arange(6.0).reshape(3, 2)
    mesh = surface.pcolormesh(x, y, shade, shading="gouraud")
    surface.set_title("risk")
    figure.colorbar(mesh, ax=surface)
    found = rows(figure)
    assert [(row["series"], row["x"], row["y"]) for row in found[:2]] == [
        ("noise", "first 9", "3.0"),
        ("noise", "second 4", "4.0"),
    ]
    assert len(found) == 2 + 6
    grid = [[a, b, shade[j, i]] for j, b in enumerate(y) for i, a in enumerate(x)]
    assert np.allclose(numbers(found[2:], "x", "y", "shade"), grid)


def test_the_same_figure_gives_the_same_table():
    figure = Figure()
    figure.subplots().plot([0.1], [1 / 3])
    assert table(figure) == "panel,series,x,y,low,high,shade\n,,0.1,0.3333333333333333,,,\n"


def test_cells_of_one_shade_have_their_centers():
    figure = Figure()
    figure.subplots().pcolormesh([0, 2, 4], [0, 1, 2, 3], np.arange(6.0).reshape(3, 2))
    found = numbers(rows(figure), "x", "y", "shade")
    assert found.tolist() == [[2 * i + 1, j + 0.5, 2 * j + i] for j in range(3) for i in range(2)]
