"""The training step, for Lightning."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler
from torchmetrics import MeanMetric, Metric

from topklass import SparseTarget
from topklass._targets import Target
from topklass.data import cutmix, generator, mixup
from topklass.functional.accuracy import among_largest, count_by_class, list_lengths
from topklass.losses import ClassificationLoss
from topklass.metrics import TopKAccuracy
from topklass.train.batches import Batch
from topklass.train.heads import FusedHead, Head, PlainHead
from topklass.train.recipe import Recipe


class Classifier(L.LightningModule):
    """A network and a loss, trained by a recipe.

    Args:
        network: maps images to logits.
        criterion: the loss.
        recipe: optimiser, schedule and seed.
        classes: number of classes.
        steps: number of optimiser steps of the whole training.
    """

    def __init__(
        self,
        network: nn.Module,
        criterion: nn.Module,
        recipe: Recipe,
        classes: int,
        steps: int,
    ) -> None:
        super().__init__()
        self.network, self.criterion, self.classes = network, criterion, classes
        self.head: Head = FusedHead(network, classes) if recipe.fused_head else PlainHead()
        self.network_in_training: Callable[[Tensor], Any] = self.forward
        if recipe.compile:  # one graph of all launches, which bound small steps
            self.network_in_training = torch.compile(self.forward, mode="reduce-overhead")
        self.recipe, self.steps = recipe, steps
        self.epochs: list[dict[str, float]] = []
        """The values logged in each epoch."""
        self.began = time.perf_counter()
        """When training began, minus the time that it took before an interruption."""
        ks = tuple(dict.fromkeys((1, recipe.k)))
        self.monitored = f"validation/{'both' if recipe.best_by == 'both' else f'top{recipe.k}'}"
        self.train_loss = MeanMetric(nan_strategy="disable")  # looking for NaN waits for the GPU
        if not torch.backends.mps.is_available():  # the same in any order of additions
            self.train_loss.set_dtype(torch.float64)
        self.train_accuracy = RankAccuracy(classes, ks, average=recipe.average)
        self.validation_accuracy = RankAccuracy(classes, ks, average=recipe.average)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of images."""
        logits: Tensor = self.network(images)
        return logits

    def on_train_epoch_start(self) -> None:
        """Tell the epoch to a criterion that changes with it."""
        for module in self.criterion.modules():
            set_epoch = getattr(module, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(self.current_epoch)

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """Make all randomness of the step (dropout, noise) a function of seed and step."""
        self._seed_randomness("step")

    def on_validation_epoch_start(self) -> None:
        """Make the noise of the validation loss a function of seed and step."""
        self._seed_randomness("validation")

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The loss of a batch."""
        images, labels = batch
        images, target = self._mixed(images, labels)
        output = self.network_in_training(images)
        targets = self.head.targets(target)
        loss = self._loss(output, targets)
        self.train_accuracy.update(self.head.ranks(output, targets), labels)
        self.train_loss.update(loss.detach().float(), len(labels))
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Loss and accuracies of a batch."""
        images, labels = batch
        output = self(images)
        targets = self.head.targets(labels)
        self.validation_accuracy.update(self.head.ranks(output, targets), labels)
        loss = self.head.loss(self.criterion, output, targets).float()
        self.log("validation/loss", loss, batch_size=len(labels), sync_dist=True)

    def on_train_batch_end(self, *_: Any) -> None:
        """Log the means of the epoch after its last step, before its validation."""
        if self.trainer.is_last_batch:
            log_mean(self, "train/loss", self.train_loss)
            self._log_accuracy("train", self.train_accuracy)

    def on_train_epoch_end(self) -> None:
        """Keep the values that were logged."""
        logged = {name: float(value) for name, value in self.trainer.callback_metrics.items()}
        self.epochs.append({"epoch": self.current_epoch + 1, **logged})

    def on_validation_epoch_end(self) -> None:
        """Log the accuracies of the epoch."""
        self._log_accuracy("validation", self.validation_accuracy)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the recipe, the logs, and the metrics of an epoch that is not complete."""
        checkpoint["recipe"] = self.recipe.as_yaml()
        checkpoint["epochs"] = self.epochs
        checkpoint["seconds"] = time.perf_counter() - self.began
        checkpoint["metrics"] = [metric_state(metric) for metric in self._metrics()]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore logs and metrics; the first process takes the metrics of all."""
        self.epochs = checkpoint["epochs"]
        self.began = time.perf_counter() - checkpoint["seconds"]
        if self.global_rank == 0:
            for metric, state in zip(self._metrics(), checkpoint["metrics"], strict=True):
                metric.load_state_dict(state)
                metric.to(self.device)

    def configure_optimizers(self) -> Any:
        """SGD with Nesterov momentum, and the recipe's schedule, step by step."""
        recipe, parameters = self.recipe, list(self.parameters())
        divided = any(isinstance(parameter, DTensor) for parameter in parameters)
        kind = SGD if divided else torch.optim.SGD
        optimizer = kind(
            parameters,
            lr=recipe.learning_rate,
            momentum=recipe.momentum,
            weight_decay=recipe.weight_decay,
            nesterov=recipe.momentum > 0,
            fused=self.device.type == "cuda" and not divided,
        )
        scheduler = make_schedule(optimizer, recipe, self.steps)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def _mixed(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Target]:
        """Images with parts of others, and their labels, of which the own one is the first."""
        kinds = (("cutmix", cutmix, self.recipe.cutmix), ("mixup", mixup, self.recipe.mixup))
        for name, mix, chance in kinds:
            key = (self.recipe.seed, name, self.global_step)
            stream = generator(*key, 0)
            if not chance or chance <= float(torch.rand((), generator=stream)):
                continue  # in all processes
            # Its shares may differ from those of other processes.
            own_stream = self.head.processes == 1 or self._takes_shares
            if own_stream and self.global_rank > 0:
                stream = generator(*key, self.global_rank)
            images, order, own = mix(images, stream)
            both = torch.stack([labels, labels[order]], 1)
            first = torch.arange(2, device=both.device) == 0
            return images, SparseTarget(both, torch.where(first, own, 1 - own).expand(both.shape))
        return images, labels

    @property
    def _takes_shares(self) -> bool:
        """Whether the criterion takes two labels at once; one from elsewhere may not."""
        return isinstance(self.criterion, ClassificationLoss)

    def _loss(self, output: object, targets: Target) -> Tensor:
        """The loss of labels that count by their shares."""
        if self._takes_shares or isinstance(targets, Tensor):
            return self.head.loss(self.criterion, output, targets)
        own, other = (self.head.loss(self.criterion, output, each) for each in targets.indices.t())
        return targets.weights[0, 0] * own + targets.weights[0, 1] * other

    def _metrics(self) -> tuple[Metric, ...]:
        return self.train_loss, self.train_accuracy

    def _seed_randomness(self, purpose: str) -> None:
        key = (self.recipe.seed, purpose, self.global_step, self.global_rank)
        torch.manual_seed(generator(*key).initial_seed())

    def _log_accuracy(self, split: str, metric: TopKAccuracy) -> None:
        values = metric.compute()
        metric.reset()
        assert isinstance(values, dict)
        if self.monitored == f"{split}/both":
            values = {**values, "both": torch.stack([*values.values()]).mean()}
        named = {f"{split}/{name}": value for name, value in values.items()}
        self.log_dict(named, on_step=False, on_epoch=True, batch_size=1)


class SGD(torch.optim.SGD):
    """SGD of ordinary tensors and of DTensors, which no fused operation takes together."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the ones after the others, each at once."""
        loss = None if closure is None else closure()
        groups = self.param_groups
        self.param_groups = [
            {**group, "params": same, "foreach": divided, "fused": not divided and same[0].is_cuda}
            for group in groups
            for divided in (False, True)
            if (same := [p for p in group["params"] if isinstance(p, DTensor) == divided])
        ]
        try:
            super().step()
        finally:
            self.param_groups = groups
        return loss


class RankAccuracy(TopKAccuracy):
    """Top-k accuracy from the ranks of labels among the logits."""

    def update(self, ranks: Tensor, target: Tensor) -> None:
        """Count ranks below k."""
        right = among_largest(ranks, list_lengths(self.k, self.num_classes))
        self._add(*count_by_class(right, target, self.num_classes, self.ignore_index))


def log_mean(module: L.LightningModule, name: str, metric: MeanMetric) -> None:
    """Log the mean of an epoch over all processes, and begin the next one."""
    module.log(name, metric.compute(), on_step=False, on_epoch=True, batch_size=1)
    metric.reset()


def metric_state(metric: Metric) -> dict[str, Tensor]:
    """What a metric has counted in all processes, for a checkpoint."""
    with metric.sync_context():
        return {name: getattr(metric, name).cpu().clone() for name in metric.metric_state}


def make_schedule(optimizer: torch.optim.Optimizer, recipe: Recipe, steps: int) -> LRScheduler:
    """The learning rate by step."""
    schedules = torch.optim.lr_scheduler
    if recipe.schedule == "one-cycle":
        return schedules.OneCycleLR(
            optimizer, recipe.learning_rate, total_steps=steps, cycle_momentum=False
        )
    if recipe.schedule == "cosine":
        return schedules.CosineAnnealingLR(optimizer, steps)
    if recipe.schedule == "steps":
        milestones = [round(share * steps) for share in recipe.milestones]
        return schedules.MultiStepLR(optimizer, milestones)
    return schedules.ConstantLR(optimizer, factor=1.0)
