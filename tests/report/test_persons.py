"""Is it this person? What the page says of matches whose numbers are made up."""

import pytest
from msgspec.structs import replace

from leakbound._util.intervals import clopper_pearson
from leakbound.assess.record import EXPOSED, NAMED, PROTECTED, Bound, Reidentification
from leakbound.assess.verdict import of_configuration, verdict
from leakbound.report import evidence, sentences, tables, write
from leakbound.report.evidence.parts import Epsilons
from leakbound.report.folder import read


def _match(right, candidates=100, matcher="nearest", **more):
    return Reidentification(matcher=matcher, right=tuple(right), candidates=candidates, **more)


def _protects():
    return Bound(
        name="probability", value=0.001, psnr=20.0, prior="public examples", covers="all",
        rests_on_prior=False, excludes_threshold=True, on_average=False, probability=0.001,
        accepted=0.01, basis="sample",
    )  # fmt: skip


@pytest.fixture
def summary(tmp_path, make_run, make_assessment):
    """A run whose experiments hold these matches, one example each batch."""

    def build(*matches):
        records = [
            make_assessment(seed=seed, reidentified=own, psnr=[12.0])
            for seed, own in enumerate(matches)
        ]
        return tables.RunSummary(read(make_run(tmp_path / "run", records)))

    return build


def test_shares_chance_and_bounds_are_means_over_examples(summary):
    found = (
        summary(
            (_match([True], 100, bound=0.03, noise_multiplier=2.0), _match([False], 100, "edges")),
            (
                _match([True], 50, bound=0.05, noise_multiplier=2.0, near=1),
                _match([True], 50, "edges"),
            ),
        )
        .configurations[0]
        .identified
    )
    assert (found.matcher, found.share.hits, found.share.n) == ("nearest", 2, 2)
    # Two matchers share the error.
    assert found.share.low == pytest.approx(clopper_pearson(2, 2, 0.0125)[0])
    assert found.chance == pytest.approx(0.015)
    assert found.bound == pytest.approx(0.04)
    assert (found.candidates, found.near) == (100, 1)


def test_a_bound_that_one_experiment_lacks_is_no_bound(summary):
    own = summary((_match([True], bound=0.5),), (_match([False]),)).configurations[0].identified
    assert own.bound is None
    assert summary((), ()).configurations[0].identified is None


def test_the_page_says_it_beside_the_decibels(summary):
    found = summary(*[(_match([True]), _match([False], matcher="edges"))] * 6)
    rows = found.configurations
    (line,) = sentences.is_it_this_person(rows, found.assessments[0].criterion)
    assert "6 of 6 named right among 100 candidates" in line
    assert "at a median of 12.0 dB" in line
    assert "no bound" in line
    page = write(found.run.folder).read_text()
    assert "Is it this person?" in page
    assert "named by nearest among 100 candidates" in page
    assert "name the right one of 100 candidates more often than chance" in page


def test_what_chance_explains_is_not_said_first(summary):
    found = summary(*[(_match([seed == 0], 20, bound=1.0),) for seed in range(6)])
    assert not found.configurations[0].identified.beyond_chance
    page = write(found.run.folder).read_text()
    assert "more often than chance" not in page
    assert "1 of 6 named right among 20 candidates" in page
    assert "excludes nothing" in page
    assert "named by nearest among 20 candidates" in page


def test_matches_fit_the_examples(make_assessment):
    with pytest.raises(ValueError, match="reidentified differ in length"):
        make_assessment(psnr=[12.0], reidentified=(_match([True, False]),))


def test_many_experiments_decide_together(make_assessment):
    """One of twelve right is chance and stays protected; three of twelve are not."""

    def experiments(hits, **more):
        for seed in range(12):
            found = (_match([seed < hits], matcher="nearest"), _match([False], matcher="edges"))
            yield make_assessment(
                psnr=[12.0], batch_size=1, seed=seed, bounds=(_protects(),), reidentified=found,
                verdict=verdict([False], [_protects()], reidentified=found), **more,
            )  # fmt: skip

    assert of_configuration(experiments(1)) == PROTECTED
    assert of_configuration(experiments(3)) == NAMED
    # Two of eight in one experiment alone; forty experiments together say that it is chance.
    eight = _match([True, True] + [False] * 6)
    alone = make_assessment(
        psnr=[12.0] * 8, batch_size=8, bounds=(_protects(),), reidentified=(eight,), verdict=NAMED
    )
    assert of_configuration([alone]) == NAMED
    none = replace(alone, verdict=PROTECTED, reidentified=(_match([False] * 8),))
    assert of_configuration([alone] + [none] * 40) == PROTECTED
    # Many attacks are many tries.
    others = [replace(none, attack=replace(none.attack, hash=f"{i:x}" * 12)) for i in range(6)]
    assert of_configuration([alone, *others]) == PROTECTED
    match = replace(none, matched=(True,) * 8, verdict=EXPOSED)
    assert of_configuration([alone, match]) == EXPOSED


def test_every_page_says_it_and_none_says_protected(summary):
    """Nobody meets the threshold, and a bound excludes it: still, half of the persons are named."""
    many = [(_match([seed % 2 == 0], bound=0.9, noise_multiplier=0.3),) for seed in range(12)]
    found = summary(*many)
    assert [row.verdict for row in found.configurations] == [NAMED]
    assert found.configurations[0].identified.beyond_chance
    page = write(found.run.folder).read_text()
    assert page.index("name the right one of 100 candidates") < page.index("No attack reconstruct")
    assert "1 of 1 is not protected (1 person named)" in page
    assert 'class="badge person-named"' in page
    subject = evidence.of_run(found.run, {}, lambda noise: Epsilons(1e-5, 1.0, 2.0), images=False)
    content = evidence.document([subject], images=False)
    for text in (evidence.page(content), evidence.card(content)):
        assert "Is it this person?" in text
        assert "6 of 12 named right among 100 candidates" in text
        assert "person named" in text
