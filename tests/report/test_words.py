"""The small functions that pages are made of, by example."""

import torch

from leakbound._util import pictures
from leakbound._util.groups import grouped
from leakbound.assess.measure import strip
from leakbound.assess.record import Threat
from leakbound.assess.verdict import together
from leakbound.report import tables, template
from leakbound.report.compare import difference, signed, threat_words
from leakbound.report.evidence import fact
from leakbound.report.evidence.parts import clean
from leakbound.report.evidence.privacy import mechanism
from leakbound.report.rerun import toml_of

TINY = """\
name = "tiny"
batch_sizes = [1]
seeds = [0]

[[models]]
name = "mlp"

[[attacks]]
name = "dlg"
steps = 9

[[defenses]]
name = "none"
"""


def test_counts_and_lists():
    assert template.listing([1, 4, 8]) == "1, 4 and 8"
    assert (template.plural(1, "batch", "batches"), template.plural(0, "experiment")) == (
        "1 batch",
        "0 experiments",
    )
    assert grouped([("a", 1), ("b", 2), ("a", 3)]) == {"a": [1, 3], "b": [2]}


def test_numbers():
    assert (signed(1.25), signed(-0.04), signed(None)) == ("+1.2", "0.0", "–")
    assert (template.significant(1.9), template.significant(100.0)) == ("1.9", "100")
    explained = [template.explained(value) for value in (0.99999, -0.3, None)]
    assert explained == ["99.999\xa0%", "0\xa0%", "–"]
    assert (fact([1, 28]), fact(None), fact({"a": 1.5})) == ("1, 28", "–", "a 1.5")
    assert clean({"a\u202eb": [1.0, float("inf"), "x\n"]}) == {"a\ufffdb": [1.0, None, "x\n"]}


def test_intervals():
    middle = tables.middle([1.0, 2.0, 9.0])
    assert middle == tables.MedianInterval(median=2.0, low=1.0, high=9.0, n=3, level=None)
    share = tables.share(0, 10)
    assert (share.low, round(share.high, 4)) == (0.0, 0.3085)
    assert round(tables.mean_of([1.0, 2.0, 3.0]).low, 4) == -0.4841
    assert (tables.mean_of([1.0]).low, tables.mean_of([])) == (None, None)
    assert round(tables.mean_error([10.0, 20.0]), 4) == 12.5964
    found = difference([(1.0, 2.0), (1.0, 4.0)])
    assert (found.mean, round(found.low, 2), round(found.high, 2)) == (2.0, -10.71, 14.71)
    assert difference([(1.0, 3.0), (2.0, 4.5), (3.0, 5.0)]).words == "higher in B"


def test_sentences():
    threat = Threat(labels_known=True, defense_known=False, server="honest", statistics_known=False)
    assert threat_words(threat) == "honest server, labels known, defense not known"
    link = "ClipExamples(clip_norm=2.0) → Mean() → GaussianMechanism(noise_multiplier=0.5)"
    assert mechanism(link) == (0.5, 2.0)
    assert (
        together(["protected from strangers", "protected on average", None])
        == "protected on average"
    )


def test_bounds_on_pages_are_rounded_against_us():
    assert template.upper_decimal(20.01) == "20.1"  # a PSNR that no attacker exceeds
    assert template.lower_bound(0.030999) == "0.0309"
    assert template.lower_percent(0.9999) == "99.9\xa0%"
    assert template.interval(0.1249, 0.8751) == "12 to 88\xa0%"
    assert (template.percent(0.004), template.percent(0.996)) == ("<1\xa0%", ">99\xa0%")


def test_a_plan_as_toml():
    plan = {
        "name": "tiny",
        "models": [{"name": "mlp", "settings": []}],
        "attacks": [{"name": "dlg", "settings": [["steps", 9]]}],
        "defenses": [[]],
        "batch_sizes": [1],
        "seeds": [0],
        "rounds": [None],
    }
    assert toml_of(plan) == TINY


def test_html():
    assert pictures.text("<b> & more") == "&lt;b&gt; &amp; more"
    assert "<td" in pictures.table(["what", "n"], [["<i>", 3]])
    assert "<i>" not in pictures.table(["what"], [["<i>"]])
    assert pictures.images(torch.zeros(2, 1, 8, 8)).count("<img") == 2
    assert pictures.images(torch.zeros(2, 10)) == (
        "<small>2 x 10 numbers: no images to show</small>"
    )
    name, content = strip(torch.zeros(2, 1, 8, 8), (0.0, 1.0))
    assert name.endswith(".png")
    assert content[:4] == b"\x89PNG"
