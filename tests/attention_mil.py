"""An attention model of bags with an instance loss, as in pathology, on a few small bags.

Nothing is random: parameters and features are sines, so that a sequence of losses can be stored.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

FEATURES, HIDDEN, INSTANCES, CLEAR = 6, 8, 20, 4


class AttentionMIL(nn.Module):
    """Gated attention (Ilse et al. 2018); clear instances are labelled, as in Lu et al. 2021.

    The ``CLEAR`` instances with the most attention should be told from those with the least.
    """

    def __init__(self, instance_loss: nn.Module) -> None:
        super().__init__()
        self.content = nn.Linear(FEATURES, HIDDEN)
        self.gate = nn.Linear(FEATURES, HIDDEN)
        self.attention = nn.Linear(HIDDEN, 1)
        self.bag_classifier = nn.Linear(FEATURES, 2)
        self.instance_classifiers = nn.ModuleList(nn.Linear(FEATURES, 2) for _ in range(2))
        self.instance_loss = instance_loss

    def forward(self, bag: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        """The logits of the bag (1, 2) and the loss of its clear instances."""
        gated = self.content(bag).tanh() * self.gate(bag).sigmoid()
        attention = self.attention(gated).squeeze(1)
        order = attention.argsort(descending=True)
        clear = torch.cat([bag[order[:CLEAR]], bag[order[-CLEAR:]]])
        targets = torch.tensor([1] * CLEAR + [0] * CLEAR)
        logits = self.instance_classifiers[int(label)](clear)
        pooled = attention.softmax(0) @ bag
        return self.bag_classifier(pooled)[None], self.instance_loss(logits, targets)


def waves(*shape: int, phase: float) -> Tensor:
    """Numbers that look random, the same everywhere."""
    count = torch.Size(shape).numel()
    return (1e4 * torch.sin(torch.arange(count, dtype=torch.float64) + phase)).sin().view(shape)


def bags() -> Iterator[tuple[Tensor, Tensor]]:
    """Twelve bags; a quarter of the instances of a bag tell its label."""
    for i in range(12):
        label = torch.tensor([i % 2])
        bag = waves(INSTANCES, FEATURES, phase=float(i))
        bag[: INSTANCES // 4, int(label)] += 1.5
        yield bag, label


def train(make_loss: Callable[..., nn.Module], epochs: int = 8) -> tuple[AttentionMIL, list[float]]:
    """The trained model, and the mean total loss of each epoch."""
    model = AttentionMIL(make_loss(n_classes=2)).double()
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.copy_(0.5 * waves(*parameter.shape, phase=100.0 + i))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    losses = []
    for _ in range(epochs):
        total = 0.0
        for bag, label in bags():
            logits, instance_loss = model(bag, label)
            loss = 0.7 * nn.functional.cross_entropy(logits, label) + 0.3 * instance_loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        losses.append(total / 12)
    return model, losses
