"""timm's training loop with mixup and CutMix: ``python examples/programs/timm_mixup.py``.

A small ResNet with random weights, seconds on a CPU. Nothing is downloaded. There are twelve
classes of images in four groups of three that look alike: at best the first guess is right for a
third of the images, and a list of three for all.
"""

import timm
import torch
from confused import CLASSES, report
from PIL import Image
from timm.data import Mixup, create_loader
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import random_seed
from torch.utils.data import Dataset

# --8<-- [start:loss]
import topklass


def train_one_epoch(model, loader, optimizer, mixup_fn):
    train_loss_fn = topklass.ShortListLoss(k=3)  # was: SoftTargetCrossEntropy()
    for input, target in loader:
        input, target = mixup_fn(input, target)  # now class probabilities
        loss = train_loss_fn(model(input), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        # --8<-- [end:loss]


SIZE = 32


class Tiles(Dataset):
    """Images of 4 × 4 tiles, whose grey values depend on the group, under noise."""

    transform = None  # set by create_loader

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(0)
        tiles = torch.rand(CLASSES // 3, 4, 4, generator=generator)
        patterns = tiles.repeat_interleave(SIZE // 4, 1).repeat_interleave(SIZE // 4, 2)
        generator.manual_seed(seed)
        self.labels = torch.randint(CLASSES, (count,), generator=generator)
        noise = 0.2 * torch.randn(count, SIZE, SIZE, generator=generator)
        grey = (patterns[self.labels // 3] + noise).clamp(0, 1)
        self.images = [Image.fromarray(x).convert("RGB") for x in (255 * grey).byte().numpy()]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.transform(self.images[index]), int(self.labels[index])


def main() -> None:
    random_seed(0)
    epochs = 5
    model = timm.create_model("test_resnet", num_classes=CLASSES)
    options = {"input_size": SIZE, "use_prefetcher": False, "num_workers": 0}
    options |= {"persistent_workers": False, "device": torch.device("cpu")}
    loader = create_loader(
        Tiles(640, seed=1), batch_size=64, is_training=True, hflip=0, scale=(0.8, 1), **options
    )
    mixup_fn = Mixup(mixup_alpha=0.2, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=CLASSES)
    optimizer = create_optimizer_v2(model, "sgd", lr=0.1, momentum=0.9)
    scheduler, _ = create_scheduler_v2(optimizer, num_epochs=epochs)
    for epoch in range(epochs):
        model.train()
        train_one_epoch(model, loader, optimizer, mixup_fn)
        scheduler.step(epoch + 1)
    model.eval()
    test = create_loader(Tiles(256, seed=2), batch_size=64, crop_pct=1.0, **options)
    with torch.no_grad():
        found = [(model(input), target) for input, target in test]
    logits, labels = map(torch.cat, zip(*found, strict=True))
    report(logits, labels)


if __name__ == "__main__":
    main()
