"""Synthetic series: no real recording is in the package."""

from __future__ import annotations

import torch

from leakbound.data.raw import Options, Raw
from leakbound.randomness import normal, stream, uniform

COUNT = 1000
TIMES = 128
SECONDS = 3.0
BEATS = 6
"""Heart beats from one second before the start on: more than fit into the window."""
LOWEST = -0.6
HIGHEST = 1.6
"""The range in millivolts that becomes [0, 1]; values outside are clipped."""
NORMAL = ((0.12, -0.18, 0.03), (-0.1, -0.03, 0.01), (1.0, 0.0, 0.012), (-0.2, 0.03, 0.012))
NORMAL_T = (0.28, 0.24, 0.05)
INVERTED_T = (-0.25, 0.3, 0.06)
WIDE = ((0.0, -0.18, 0.03), (-0.1, -0.07, 0.03), (1.0, 0.0, 0.035), (-0.2, 0.08, 0.03))
"""Waves P, Q, R, S as (height in millivolts, place, width), both in seconds from the R wave."""


def ecg(options: Options) -> Raw:
    """1,000 synthetic one-lead electrocardiograms (1, T) of three seconds, half of them abnormal.

    A beat is a sum of Gaussian waves P, Q, R, S and T, of heights that vary by 20 %. Rate (55 to 86
    beats a minute) and phase are random; a slow drift and noise of 0.01 mV are added. Abnormal ones
    have no P wave, a wide QRS complex and an inverted T wave. The shapes resemble recordings; they
    are no model of a heart. `size` is the number of times T (128 if not given).

    Source: after McSharry et al. 2003, whose waves are Gaussian too.
    """
    if options.channels not in (None, 1):
        raise ValueError(f"channels is {options.channels}; the series have one: leave it out")
    times = torch.arange(options.size or TIMES) / (options.size or TIMES) * SECONDS
    labels = torch.arange(COUNT) % 2
    draws = uniform((COUNT, 3), stream(0, "ecg", "beats"))
    period = 0.7 + 0.4 * draws[:, :1]
    phase = 0.7 * draws[:, 1:2]
    peaks = phase + period * torch.arange(-1, BEATS - 1)  # (N, beats)
    heights = 0.8 + 0.4 * uniform((COUNT, BEATS, 5), stream(0, "ecg", "heights"))
    kinds = torch.tensor([[*NORMAL, NORMAL_T], [*WIDE, INVERTED_T]])[labels]
    series = torch.zeros(COUNT, len(times))
    for wave in range(5):
        height, place, width = kinds[:, wave].unsqueeze(-1).unbind(1)
        sizes = height * heights[:, :, wave]
        for beat in range(BEATS):
            apart = (times - peaks[:, beat : beat + 1] - place) / width
            series += sizes[:, beat : beat + 1] * torch.exp(-0.5 * apart.square())
    drift = 0.05 * torch.sin(2 * torch.pi * (0.1 + 0.3 * draws[:, 2:]) * times)
    series += drift + 0.01 * normal((COUNT, len(times)), stream(0, "ecg", "noise"))
    scaled = ((series - LOWEST) / (HIGHEST - LOWEST)).clamp(0, 1)
    return Raw(scaled[:, None], labels, ("normal", "abnormal"))
