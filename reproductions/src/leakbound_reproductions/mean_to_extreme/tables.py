"""Further pages: all certificates, attacks against the exact edge, noisy copies."""

from __future__ import annotations

from collections.abc import Sequence

from leakbound_reproductions.mean_to_extreme import copies, grid


def certificates(rows: Sequence[grid.Certificate]) -> list[str]:
    """What is promised, what is reached, and the exact edge."""
    lines = [
        "# The certificate and who beats it",
        "",
        "At the eta of which paper C says that at most the promised share of reconstructions is "
        "below it: how often the estimator that knows the norm is, in uniform directions.",
        "",
        "| N | noise multiplier | promised | measured | gamma* | no attacker exceeds |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row.dim} | {row.noise:g} | {row.promised:g} | {row.hits} of {row.n} | "
            f"{row.exact:.4g} | {row.upper:.4g} |"
        )
    broken = sum(row.hits / row.n > row.promised * 1.1 for row in rows)
    return [*lines, "", f"Beaten by more than a tenth in {broken} of {len(rows)} settings."]


def edges(found: grid.Beaten) -> list[str]:
    """How far any estimator came above gamma*."""
    lines = [
        "",
        "# Does an attack beat the edge that covers it?",
        "",
        f"{found.compared} comparisons with gamma*, {len(found.above)} above it by more than "
        f"{grid.TOLERANCE:g} standard errors; the largest {found.worst:.2f}.",
    ]
    return lines + [f"- {line}" for line in found.above]


def noisy_copies(rows: Sequence[copies.Copied]) -> list[str]:
    """Risk and accuracy of noisy copies and of DP-SGD."""
    return [
        "",
        "# A noisy copy of each record, or fresh noise in each round",
        "",
        "SimpleConvNet on MNIST, 4 clients x 16 images, Adam; the risk is the probability of 20 dB "
        "that no attacker exceeds, for a uniform direction and the least norm of the data. Images "
        "are no uniform directions: where a model learns to read the copies, so may an attacker.",
        "",
        *copies.table(rows),
    ]
