"""A plain training loop: ``python examples/programs/plain_pytorch.py``, seconds on a CPU."""

import torch
from confused import CLASSES, FEATURES, report, samples
from torch import nn
from torch.utils.data import DataLoader

# --8<-- [start:loss]
import topklass

criterion = topklass.ShortListLoss(k=3)  # was: nn.CrossEntropyLoss()


def train(model, loader, optimizer):
    for inputs, labels in loader:
        optimizer.zero_grad()
        criterion(model(inputs), labels).backward()
        optimizer.step()
        # --8<-- [end:loss]


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(samples(1200, seed=1), batch_size=32, shuffle=True)
    for _ in range(3):
        train(model, loader, optimizer)
    inputs, labels = samples(600, seed=2).tensors
    with torch.no_grad():
        report(model(inputs), labels)


if __name__ == "__main__":
    main()
