"""A Lightning module: ``python examples/programs/lightning_module.py``, seconds on a CPU."""

import lightning
import torch
from confused import CLASSES, FEATURES, report, samples
from torch import nn
from torch.utils.data import DataLoader

# --8<-- [start:loss]
import topklass
from topklass.metrics import TopKAccuracy


class Classifier(lightning.LightningModule):
    def __init__(self, network, num_classes):
        super().__init__()
        self.network, self.accuracy = network, TopKAccuracy(num_classes, k=3)
        self.criterion = topklass.ShortListLoss(k=3)  # was: nn.CrossEntropyLoss()

    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        return self.criterion(self.network(inputs), labels)

    # --8<-- [end:loss]

    def validation_step(self, batch, batch_idx):
        inputs, labels = batch
        self.accuracy(self.network(inputs), labels)
        self.log("top-3 accuracy", self.accuracy, prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def main() -> None:
    lightning.seed_everything(0)
    network = nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, CLASSES))
    model = Classifier(network, CLASSES)
    test = samples(600, seed=2)
    trainer = lightning.Trainer(
        max_epochs=3, accelerator="cpu", logger=False, enable_checkpointing=False
    )
    trainer.fit(
        model,
        DataLoader(samples(1200, seed=1), batch_size=32, shuffle=True),
        DataLoader(test, batch_size=100),
    )
    inputs, labels = test.tensors
    with torch.no_grad():
        report(network(inputs), labels)


if __name__ == "__main__":
    main()
