"""The states that keep more scores than k: the largest scores, and the sums of all others."""

import math

import pytest
import torch
from smooth_cases import slow

from topklass.kernels.smooth.launch import alignment, rows_of
from topklass.kernels.wide.launch import kept_out, new_buffer, plan, read_states


@pytest.mark.parametrize(("n", "k"), [(40, 11), slow(1100, 12), slow(2100, 11), slow(70, 32)])
def test_largest_scores_and_sums_of_the_others(n, k):
    some = torch.arange(n)
    scores = torch.stack(
        [
            torch.randn(n),
            torch.zeros(n),
            torch.where(some % 2 == 0, 0.0, -0.0),
            (some % 7).float(),
            torch.where(some % 5 == 0, some.float(), -math.inf),
            torch.linspace(-1e38, 1e38, n),
        ]
    )
    labels = torch.tensor([[0], [n - 1], [-100], [6], [n // 5 * 5 - 5], [n - 1]])
    problem = rows_of(scores, labels)
    tiles = plan(*scores.shape, alignment(scores), k, apart=True)
    buffer, kept, entries = new_buffer(scores, k), kept_out(k, 1), kept_out(k, 1) + 1
    read_states(problem, buffer, 2.0, -100, tiles)
    size = 2 * entries + k + 2
    states = buffer[1 : 1 + 6 * tiles.parts * size].view(6, tiles.parts, size)
    for row, label, pieces in zip(scores.double(), labels[:, 0].tolist(), states, strict=True):
        others = row if label < 0 else row.index_fill(0, torch.tensor(label), -math.inf)
        for piece, state in zip(others.split(tiles.piece), pieces, strict=True):
            heads, classes, sums, (threshold, _) = state.split((entries, entries, k, 2))
            heads, classes = heads[:kept], classes[:kept].long()
            count = min(kept, len(piece))
            assert torch.equal(heads.sort(descending=True).values[:count], piece.topk(count).values)
            assert threshold == heads.min().clamp(min=torch.finfo(torch.float32).min)
            present = heads > -math.inf
            assert torch.equal(others[classes[present]], heads[present])
            rest = piece.clone()
            rest[classes[present] % tiles.piece] = -math.inf
            powers = ((rest - threshold) / 2.0 * torch.arange(1, k + 1).unsqueeze(1)).exp()
            torch.testing.assert_close(sums, powers.sum(1), rtol=1e-6, atol=1e-12)
