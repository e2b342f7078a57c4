"""The noised loss by the number of its noise vectors: gradients, accuracy, time.

Data and training are those of ``examples/ambiguous_labels.py``, the whole training set in every
step; only the initialisation is random, so that seeds differ without noise too. ``samples=None``
is the exact expectation, the limit of infinitely many noise vectors.
"""

import math
import time

import torch
from examples import ambiguous_labels as demo
from torch import Tensor, nn

from benchmarks.candidates import Loss
from benchmarks.environment import describe, write
from benchmarks.others import Others
from benchmarks.rows import Row, digits, say
from benchmarks.timing import forward_backward, medians
from topklass import NoisedTopKLoss, topk_accuracy
from topklass.functional import noised_topk_loss

CPU = torch.device("cpu")
K = demo.K
EPSILONS = (0.2, 1.0)
SAMPLES = (1, 5, 10, 100, None)
DRAWS = {1: 400, 5: 400, 10: 400, 100: 100}
"""How many gradients are drawn for each number of noise vectors."""
STEPS = (0, 20, demo.STEPS)
"""Gradients are compared after so many steps with the exact loss, or the best step until then."""
SEEDS = 8
LEARNING_RATES = (0.03, 0.1)
"""Of the demo's grid, the best on the validation set for epsilon = 0.2, and for epsilon = 1."""
WEIGHT_DECAY = 0.01
BASE = 10
"""Times are relative to so many noise vectors."""


def main(quick: bool) -> None:
    start = time.perf_counter()
    torch.set_num_threads(1)  # as in the demo: the matrices are small
    data = demo.make_data(demo.CLASSES, K, demo.NOISE, demo.DECAY, seed=0)
    record = {
        "what": "data of examples/ambiguous_labels.py, k = 5; variance of the gradient over noise, "
        "over the exact gradient's squared norm; distance of the mean from the exact gradient in "
        "standard errors; test accuracy for each seed; forward + backward of the loss, in turn",
        **describe(CPU),
        "gradient": gradients(data, quick),
        "accuracy": accuracies(data, quick),
        **times(data, quick),
    }
    write("noise", record, quick)
    print(f"{time.perf_counter() - start:.0f} s", flush=True)


def noised(epsilon: float, samples: int | None) -> NoisedTopKLoss:
    return NoisedTopKLoss(k=K, epsilon=epsilon, samples=samples)


def trained(
    loss: Loss,
    data: demo.Splits,
    seed: int = 0,
    learning_rate: float = LEARNING_RATES[0],
    steps: int = demo.STEPS,
) -> nn.Linear:
    """The demo's model from a random start."""
    torch.manual_seed(seed)
    model = nn.Linear(demo.FEATURES, data.classes)
    return demo.train(model, loss, data, K, learning_rate, WEIGHT_DECAY, steps).model


def said(row: Row) -> Row:
    say(row)
    return row


# Gradients


def gradients(data: demo.Splits, quick: bool) -> list[Row]:
    """A row a model and number of noise vectors, and one for the chance of the data."""
    rows = []
    for epsilon in EPSILONS:
        for steps in STEPS[:1] if quick else STEPS:
            exact = noised(epsilon, None)
            model = trained(exact, data, steps=steps)
            expected = gradient(model, data.training, exact)
            where = {"epsilon": epsilon, "steps": steps}
            for samples, draws in DRAWS.items():
                loss = noised(epsilon, samples)
                drawn = [
                    gradient(model, data.training, loss)
                    for _ in range(draws // 20 if quick else draws)
                ]
                found = spread(torch.stack(drawn), expected)
                rows.append(said({**where, "samples": samples, "draws": len(drawn), **found}))
            size = expected.square().sum().item()
            found = chance_of_data(model, data.training, epsilon, size)
            rows.append(said({**where, "samples": None, **found}))
    return rows


def gradient(model: nn.Linear, split: demo.Split, loss: Loss) -> Tensor:
    """The gradient of all parameters, as one vector in float64."""
    parts = torch.autograd.grad(loss(model(split.features), split.labels), list(model.parameters()))
    return torch.cat([part.flatten() for part in parts]).double()


def spread(drawn: Tensor, exact: Tensor) -> Row:
    """Variance, and distance of the mean from the exact gradient, of (draws, parameters).

    The distance is in standard errors, those of all parameters together: about 1 without bias. The
    bias is what the distance leaves beyond chance, relative to the exact gradient.
    """
    variance = drawn.var(0).sum().item()
    distance = (drawn.mean(0) - exact).square().sum().item()
    by_chance = variance / len(drawn)
    size = exact.square().sum().item()
    return {
        "variance": digits(variance / size),
        "distance": digits(math.sqrt(distance / by_chance)),
        "bias": digits(math.sqrt(max(0.0, distance - by_chance) / size)),
    }


def chance_of_data(model: nn.Linear, split: demo.Split, epsilon: float, size: float) -> Row:
    """What chance the data bring: variance of the exact gradient over samples of as many rows.

    A row's gradient is the outer product of that of its scores with its features and a one. Beside
    it, the share of rows that have a loss at all.
    """
    scores = model(split.features).detach().requires_grad_()
    losses = noised_topk_loss(scores, split.labels, K, epsilon, None, reduction="none")
    (of_scores,) = torch.autograd.grad(losses.sum(), scores)
    squares = of_scores.square().sum(1) * (split.features.square().sum(1) + 1)
    return {
        "variance": digits((squares.mean().item() / size - 1) / len(squares)),
        "active": round((losses > 0).double().mean().item(), 3),
    }


# Accuracy


def accuracies(data: demo.Splits, quick: bool) -> list[Row]:
    """A row a loss and learning rate, with the accuracies of every seed."""
    losses: list[tuple[float | None, int | None, Loss]] = [(None, None, nn.CrossEntropyLoss())]
    losses += [(e, b, noised(e, b)) for e in EPSILONS for b in SAMPLES]
    seeds, steps = (2, 2) if quick else (SEEDS, demo.STEPS)
    rows = []
    for learning_rate in LEARNING_RATES:
        for epsilon, samples, loss in losses:
            found = [
                accuracy(trained(loss, data, seed, learning_rate, steps), data.test)
                for seed in range(seeds)
            ]
            top_1, top_k = (list(column) for column in zip(*found, strict=True))
            row = {"learning_rate": learning_rate, "epsilon": epsilon, "samples": samples}
            rows.append(said({**row, "top_1": top_1, "top_k": top_k}))
    return rows


def accuracy(model: nn.Linear, split: demo.Split) -> list[float]:
    """Top-1 and top-k accuracy."""
    with torch.no_grad():
        found = topk_accuracy(model(split.features), split.labels, k=(1, K))
    return [round(value, 5) for value in found.tolist()]


# Time


def times(data: demo.Splits, quick: bool) -> Row:
    """Forward + backward, for the scores of the demo and for many classes."""
    others = Others()
    model = trained(noised(EPSILONS[0], BASE), data, steps=STEPS[1])
    torch.manual_seed(0)
    scores = {"demo": (model(data.training.features).detach(), data.training.labels)}
    if not quick:
        scores["3·randn"] = (3 * torch.randn(256, 1_000), torch.randint(1_000, (256,)))
    rows = []
    for name, (logits, labels) in scores.items():
        shape = {"scores": name, "rows": len(logits), "classes": logits.shape[1]}
        leaf = logits.requires_grad_()
        for epsilon in EPSILONS:
            steps = {str(b): forward_backward(noised(epsilon, b), leaf, labels) for b in SAMPLES}
            seconds = medians(steps, CPU)
            for b in SAMPLES:
                row = {**shape, "epsilon": epsilon, "samples": b}
                row["milliseconds"] = digits(1e3 * seconds[str(b)])
                row["ratio"] = digits(seconds[str(b)] / seconds[str(BASE)])
                rows.append(said(row))
    return {"time": rows, "cores_used_by_others": others.cores()}
