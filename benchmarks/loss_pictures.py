"""Every loss and its gradient by the label's score, to docs/images/losses.

The label has nine rivals, with the scores 4, 3, …, −4. It is among the three largest scores where
its own exceeds 2.
"""

from collections.abc import Callable
from dataclasses import dataclass

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

import topklass
from benchmarks.environment import ROOT
from experiments.style import LOOK, SMALL, WIDTH, legend_below, save
from topklass.report.colours import COLOURS, SHADES
from topklass.report.svg import QUIET

IMAGES = ROOT / "docs" / "images" / "losses"
K = 3
RIVALS = torch.arange(4.0, -5.0, -1.0, dtype=torch.float64)
LABEL_SCORES = torch.linspace(-3, 11, 561, dtype=torch.float64)
Target = Callable[[int], Tensor]


def one_label(rows: int) -> Tensor:
    """The first class."""
    return torch.zeros(rows, dtype=torch.int64)


def two_labels(rows: int) -> Tensor:
    """The first class, and its best rival."""
    return torch.tensor([[0, 1]]).expand(rows, 2)


@dataclass(frozen=True)
class Picture:
    """What is drawn of a loss."""

    file: str
    colour: str
    losses: dict[str, nn.Module]
    """By the value of a setting; the gradient is that of the one with these parameters:"""
    default: str
    compared: bool = True
    """Whether to draw cross-entropy, too."""
    target: Target = one_label


def pictures() -> list[Picture]:
    """All losses."""
    off = {"reduction": "none"}
    margins = (0.0, 1.0, 2.0)
    return [
        Picture(
            "smooth",
            "smooth",
            {f"τ = {t:g}": topklass.SmoothTopKLoss(K, t, **off) for t in (0.1, 0.5, 1.0, 2.0)},
            "τ = 1",
        ),
        Picture(
            "noised",
            "noised",
            {
                f"ε = {e:g}": topklass.NoisedTopKLoss(K, e, None, **off)
                for e in (0.0, 0.5, 1.0, 2.0)
            },
            "ε = 1",
        ),
        Picture(
            "topk-cross-entropy",
            "topk-cross-entropy",
            {f"k = {k}": topklass.TopKCrossEntropyLoss(k, **off) for k in (1, 2, 3, 5)},
            "k = 3",
        ),
        Picture(
            "short-list",
            "short-list",
            {f"first_guess = {g:g}": topklass.ShortListLoss(K, g, **off) for g in (0.0, 0.5, 1.0)},
            "first_guess = 0.5",
        ),
        Picture(
            "multilabel",
            "smooth",
            {f"k = {k}": topklass.MultiLabelSmoothTopKLoss(k, **off) for k in (1, 3, 5)},
            "k = 3",
            compared=False,
            target=two_labels,
        ),
        Picture(
            "calibrated-hinge",
            "calibrated-hinge",
            {f"margin = {m:g}": topklass.CalibratedTopKHingeLoss(K, m, **off) for m in margins},
            "margin = 1",
        ),
        Picture(
            "hinge",
            "hinge",
            {f"margin = {m:g}": topklass.TopKHingeLoss(K, m, **off) for m in margins},
            "margin = 1",
        ),
        Picture(
            "convex-hinge",
            "convex-hinge",
            {f"margin = {m:g}": topklass.ConvexTopKHingeLoss(K, m, **off) for m in margins},
            "margin = 1",
        ),
        Picture(
            "ldam",
            "ldam",
            {f"margin = {m:g}": topklass.LDAMLoss(m, 1.0, **off) for m in margins},
            "margin = 1",
            compared=False,
        ),
        Picture(
            "focal",
            "focal",
            {f"γ = {g:g}": topklass.FocalLoss(g, **off) for g in (0.0, 1.0, 2.0, 5.0)},
            "γ = 2",
            compared=False,
        ),
    ]


def curves(criterion: nn.Module, target: Target = one_label) -> tuple[Tensor, Tensor]:
    """Losses (R), and their gradients by the scores of the label and of its rivals (R, 10)."""
    rivals = RIVALS.expand(len(LABEL_SCORES), -1)
    scores = torch.cat([LABEL_SCORES[:, None], rivals], 1).requires_grad_()
    losses: Tensor = criterion(scores, target(len(scores)))
    (gradient,) = torch.autograd.grad(losses.sum(), scores)
    return losses.detach(), gradient


def main() -> None:
    for picture in pictures():
        with matplotlib.rc_context(LOOK):
            figure = drawn(picture)
        default = picture.losses[picture.default]
        alt = f"{type(default).__name__} and its gradient by the score of the label"
        path = save(figure, IMAGES, picture.file, alt)
        print(f"drew {path.relative_to(ROOT)}")


def drawn(picture: Picture) -> Figure:
    """The loss above, its gradient below."""
    figure = Figure(figsize=(WIDTH, 5.4), layout="constrained")
    upper, lower = figure.subplots(2, sharex=True, height_ratios=(1.15, 1))
    draw_losses(upper, picture)
    draw_gradient(lower, picture)
    for axes in (upper, lower):
        axes.axvline(float(RIVALS[K - 1]), color=QUIET, linewidth=0.8, linestyle=(0, (2, 2)))
    upper.legend(loc="upper right", handlelength=2.2)
    legend_below(figure, lower.get_legend_handles_labels()[0])
    top = upper.get_xaxis_transform()
    place = {"transform": top, "fontsize": SMALL, "color": QUIET, "va": "bottom"}
    upper.text(float(RIVALS[K - 1]), 1.0, f"enters the top {K}", ha="center", **place)
    return figure


def draw_losses(axes: Axes, picture: Picture) -> None:
    colours = [light for light, _ in SHADES.values()]
    step = (len(colours) - 1) / max(1, len(picture.losses) - 1)
    for number, (label, criterion) in enumerate(picture.losses.items()):
        is_default = label == picture.default
        axes.plot(
            LABEL_SCORES,
            curves(criterion, picture.target)[0],
            color=COLOURS[picture.colour][0] if is_default else colours[round(number * step)],
            linewidth=2.4 if is_default else 1.2,
            label=label,
        )
    if picture.compared:
        plain, _ = curves(nn.CrossEntropyLoss(reduction="none"))
        axes.plot(LABEL_SCORES, plain, color=QUIET, linestyle=":", label="cross-entropy")
    axes.set(ylabel="loss")


def draw_gradient(axes: Axes, picture: Picture) -> None:
    _, gradient = curves(picture.losses[picture.default], picture.target)
    lines = {"the label": 0, "best rival": 1, "third rival": 3, "fourth rival": 4}
    looks = [(COLOURS[picture.colour][0], "-", 2.4)]
    looks += [(SHADES[f"shade-{n}"][0], dash, 1.4) for n, dash in ((0, "-"), (3, "--"), (5, "-."))]
    for (label, place), (colour, dash, width) in zip(lines.items(), looks, strict=True):
        axes.plot(
            LABEL_SCORES,
            gradient[:, place],
            color=colour,
            linestyle=dash,
            linewidth=width,
            label=label,
        )
    axes.set(xlabel="score of the label", ylabel=f"gradient, {picture.default}")
