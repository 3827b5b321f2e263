"""Further pages: all certificates, attacks compared with gamma*, noisy copies."""

from __future__ import annotations

from collections.abc import Sequence

from leakbound_reproductions.mean_to_extreme import copies, grid


def certificates(rows: Sequence[grid.Certificate]) -> list[str]:
    """What is promised, what is attained, and gamma*."""
    lines = [
        "# The certificate, and an estimator that exceeds it",
        "",
        "Paper C promises that at most the promised share of reconstructions has an error of at "
        "most eta. 'measured' counts how often the estimator that knows the norm reaches that "
        "eta, for uniform directions.",
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
    return [*lines, "", f"Exceeded by more than a tenth in {broken} of {len(rows)} settings."]


def edges(found: grid.Beaten) -> list[str]:
    """How far any estimator exceeds gamma*."""
    lines = [
        "",
        "# Does any attack exceed gamma*?",
        "",
        f"{found.compared} comparisons with gamma*, {len(found.above)} above it by more than "
        f"{grid.TOLERANCE:g} standard errors; the largest {found.worst:.2f}.",
    ]
    return lines + [f"- {line}" for line in found.above]


def noisy_copies(rows: Sequence[copies.Copied]) -> list[str]:
    """Risk and accuracy of noisy copies and of DP-SGD."""
    return [
        "",
        "# A noisy copy of each example, or fresh noise in each round",
        "",
        "SimpleConvNet on MNIST, 4 clients x 16 images, Adam. The risk is an upper bound on any "
        "attacker's probability of 20 dB, for a uniform direction and the smallest norm of the "
        "data. Images do not have uniform directions: if a model learns from the copies, an "
        "attacker may too.",
        "",
        *copies.table(rows),
    ]
