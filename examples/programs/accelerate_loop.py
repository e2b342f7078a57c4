"""A loop of accelerate: ``python examples/programs/accelerate_loop.py``, seconds on a CPU.

With gradient accumulation; ``accelerate launch`` runs the same file on several devices.
"""

import torch
from accelerate import Accelerator
from confused import CLASSES, FEATURES, report, samples
from torch import nn
from torch.utils.data import DataLoader

# --8<-- [start:loss]
import topklass


def train(accelerator, model, loader, optimizer):
    criterion = topklass.ShortListLoss(k=3)  # was: nn.CrossEntropyLoss()
    for inputs, labels in loader:
        with accelerator.accumulate(model):
            accelerator.backward(criterion(model(inputs), labels))
            optimizer.step()
            optimizer.zero_grad()
            # --8<-- [end:loss]


def main() -> None:
    torch.manual_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    network = nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, CLASSES))
    model, optimizer, loader, test = accelerator.prepare(
        network,
        torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9),
        DataLoader(samples(1200, seed=1), batch_size=16, shuffle=True),
        DataLoader(samples(600, seed=2), batch_size=100),
    )
    for _ in range(3):
        train(accelerator, model, loader, optimizer)
    with torch.no_grad():
        found = [accelerator.gather_for_metrics((model(x), y)) for x, y in test]
    if accelerator.is_main_process:
        logits, labels = map(torch.cat, zip(*found, strict=True))
        report(logits, labels)


if __name__ == "__main__":
    main()
