"""Paper D reproduced: pruned federated learning under attack, and PriPrune."""

from __future__ import annotations

from pathlib import Path

from leakbound_reproductions.outcome import SCALES, SMALL, Figure, Outcome, Tell
from leakbound_reproductions.priprune import page, run
from leakbound_reproductions.priprune.claims import claims
from leakbound_reproductions.priprune.measured import Measured
from leakbound_reproductions.priprune.study import Study

FIGURES = (
    Figure("rates.png", "NMI and PSNR of SGI against the pruning rate.", "figure 2"),
    Figure(
        "defense_rounds.png",
        "Accuracy, NMI of SGI and the withheld share by round, without a defense, with fixed rates "
        "and with PriPrune.",
        "figures 8a, 8b and 8d",
    ),
    Figure(
        "parameters.png",
        "NMI of SGI against the pruning rate, the batch size, the number of weights (by depth) "
        "and the round. One line per scheme.",
        "figures 4a, 4b, 5a and 5b",
    ),
    Figure(
        "attacks.png",
        "NMI of SGI and of GI against the pruning rate, if the client prunes a dense model.",
        "figure 3",
    ),
    Figure(
        "accuracy_nmi.png",
        "NMI of SGI against accuracy: fixed rules with real and pseudo-pruning; rates and "
        "PriPrune; four schemes with PriPrune and without.",
        "figures 6, 8c and 9",
    ),
    Figure("rate.png", "PSNR of both attacks against the rate, with and without a shared mask."),
    Figure(
        "tradeoff.png", "Accuracy against the PSNR of SGI and of the strongest attack, by round."
    ),
    Figure("gallery.png", "Reconstructions of one image under each defense, by round."),
)


def reproduce(scale: str, folder: Path, *, workers: int, color: str, tell: Tell) -> Outcome:
    """Measure what `folder` does not have yet and judge claims 4-1 to 4-9.

    Args:
        scale: one of `SCALES`.
        folder: for the journal, tables and figures; a later call goes on from it.
        workers: processes.
        color: not used: the plans are on digits, as the paper's first data set is on characters.
        tell: called as it goes on.

    Raises:
        ValueError: no such scale.
    """
    if scale not in SCALES:
        raise ValueError(f"scale is {scale!r}; give one of {', '.join(SCALES)}")
    study = Study.read(scale)
    wanted = study.cells()
    records = run.records(wanted, folder, workers, tell)
    tell("tables and figures", 0, 1)
    page.write(study, wanted, records, folder, small=scale == SMALL)
    found = Measured.of(wanted, records)
    tell("tables and figures", 1, 1)
    base = study.base
    where = f"{base['data']}, {base['size']} x {base['size']}"
    drawn = tuple(figure for figure in FIGURES if (folder / figure.file).is_file())
    return Outcome(tuple(claims(found, where)), drawn, settings(study), (page.FILE,))


def settings(study: Study) -> str:
    """Data, model, attacks and training, in a paragraph."""
    base = study.base
    return (
        f"Images: {base['data']}, {base['size']} x {base['size']}; model: {base['model']}; "
        f"{base.get('clients', 10)} clients, {base['rounds']} rounds, of which "
        f"{', '.join(map(str, base['marks']))} are attacked with {base['steps']} steps. Client 0 "
        "holds one image unless stated otherwise, and takes part in every round. NMI is raw, as "
        "in the paper; its chance level is far from 0 (see the results page for corrected "
        "measures). PriPrune uses the paper's weights for its three terms, scaled by the number "
        "of model weights."
    )
