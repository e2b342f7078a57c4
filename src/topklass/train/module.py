"""The training step, for Lightning."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import get_ema_multi_avg_fn

from topklass.data import cutmix, generator
from topklass.metrics import TopKAccuracy
from topklass.train.batches import Batch
from topklass.train.recipe import Recipe

ACCURACY_COUNTS = ("hits", "samples")
"""Of :class:`TopKAccuracy`."""


class Classifier(L.LightningModule):
    """A network and a loss, trained by a recipe.

    Args:
        network: maps images to logits.
        criterion: the loss.
        recipe: optimiser, schedule and seed.
        classes: number of classes.
        steps: number of optimiser steps of the whole training.
        loss_scale: what the loss is multiplied by in training.
    """

    def __init__(
        self,
        network: nn.Module,
        criterion: nn.Module,
        recipe: Recipe,
        classes: int,
        steps: int,
        loss_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.network, self.criterion = network, criterion
        self.averaged = copy.deepcopy(network).requires_grad_(False) if recipe.ema else None
        self.network_in_training: Callable[[Tensor], Any] = self.forward
        if recipe.compile:  # one graph of all launches: small steps are bound by these
            torch.compiler.reset()  # after several runs in a process, nothing would be compiled
            self.network_in_training = torch.compile(self.forward, mode="reduce-overhead")
        self.recipe, self.steps, self.loss_scale = recipe, steps, loss_scale
        self.epochs: list[dict[str, float]] = []
        """What was logged in each epoch."""
        self.sums: dict[str, tuple[Tensor, float]] = {}
        """Of the epoch so far: what is logged of training in the mean, times samples; samples."""
        self.began = time.perf_counter()
        """When training began; earlier by what it took before an interruption."""
        ks = tuple(dict.fromkeys((1, recipe.k)))
        self.monitored = f"validation/top{recipe.k}"
        self.accuracies = nn.ModuleDict(
            {
                split: TopKAccuracy(classes, ks, average=recipe.average)
                for split in ("train_split", "validation_split")
            }
        )

    def forward(self, images: Tensor) -> Tensor:
        """Logits of images; after training those of the averaged weights, if there are any."""
        own = self.training or self.averaged is None
        logits: Tensor = self.network(images) if own else self.averaged(images)  # type: ignore[misc]
        return logits

    def optimizer_step(self, *args: Any, **options: Any) -> None:
        """Change the weights, and their moving average."""
        super().optimizer_step(*args, **options)
        if self.averaged is not None and self.recipe.ema is not None:
            follow(self.averaged, self.network, self.recipe.ema, self.global_step)

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """Make all chance of the step (dropout, noise) a function of seed and step."""
        self._seed_chance("step")

    def on_validation_epoch_start(self) -> None:
        """Take the loss of training, with samples: exact ones can take longer than the network."""
        self.criterion.train()
        self._seed_chance("validation")

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The loss of a batch, times its scale."""
        images, labels = batch
        images, others, own = self._mixed(images, labels)
        logits = self.network_in_training(images)
        logits.register_hook(self._see_gradient)
        loss: Tensor = self.criterion(logits, labels)
        if own < 1:
            loss = own * loss + (1 - own) * self.criterion(logits, others)
        self._accuracy("train").update(logits.detach(), labels)
        self._add("train/loss", loss.detach().float(), len(labels))
        return loss * self.loss_scale

    def on_after_backward(self) -> None:
        """Note the share of the logits whose gradient is not 0."""
        self._add("train/gradient", self.share, self.recipe.batch_size)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Loss and accuracies of a batch."""
        images, labels = batch
        logits = self(images)
        self._accuracy("validation").update(logits, labels)
        loss = self.criterion(logits, labels).float()
        self.log("validation/loss", loss, batch_size=len(labels), sync_dist=True)

    def on_train_batch_end(self, *_: Any) -> None:
        """Log means of the epoch; Lightning's would be of the steps since it was continued."""
        if self.trainer.is_last_batch:
            for name in self.sums:
                total, samples = self._of_all_processes(self._sums(name))
                self.log(name, total / samples, on_step=False, on_epoch=True, batch_size=1)
            self.sums = {}

    def on_train_epoch_end(self) -> None:
        """Log the accuracies of the epoch, and keep what was logged."""
        self._log_accuracy("train")
        logged = {name: float(value) for name, value in self.trainer.callback_metrics.items()}
        self.epochs.append({"epoch": self.current_epoch + 1, **logged})

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save what was logged, and what is to be: Lightning forgets it if a run is continued."""
        checkpoint["epochs"] = self.epochs
        checkpoint["seconds"] = time.perf_counter() - self.began
        so_far = {name: getattr(self._accuracy("train"), name) for name in ACCURACY_COUNTS}
        so_far |= {name: self._sums(name) for name in self.sums}
        checkpoint["epoch_so_far"] = {
            name: self._of_all_processes(each).cpu() for name, each in so_far.items()
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Go on with it; what all processes have seen, one of them has now."""
        self.epochs = checkpoint.get("epochs", [])
        self.began = time.perf_counter() - checkpoint.get("seconds", 0.0)
        if self.global_rank == 0:
            for name, each in checkpoint.get("epoch_so_far", {}).items():
                if name in ACCURACY_COUNTS:
                    setattr(self._accuracy("train"), name, each.to(self.device))
                else:
                    self.sums[name] = each[0].to(self.device), each[1].item()

    def _sums(self, name: str) -> Tensor:
        total, samples = self.sums[name]
        return torch.stack((total, torch.full_like(total, samples)))

    def _of_all_processes(self, sums: Tensor) -> Tensor:
        summed: Tensor = self.trainer.strategy.reduce(sums.clone(), reduce_op="sum")
        return summed

    def on_validation_epoch_end(self) -> None:
        """Log the accuracies of the epoch."""
        self._log_accuracy("validation")

    def configure_optimizers(self) -> Any:
        """SGD with Nesterov momentum, and the recipe's schedule, step by step."""
        recipe = self.recipe
        optimizer = torch.optim.SGD(
            self.parameters(),
            lr=recipe.learning_rate,
            momentum=recipe.momentum,
            weight_decay=recipe.weight_decay,
            nesterov=recipe.momentum > 0,
            fused=self.device.type == "cuda",
        )
        scheduler = make_schedule(optimizer, recipe, self.steps)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def _mixed(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, float]:
        """Images with parts of others, the others' labels, and the weight of their own labels."""
        if not self.recipe.cutmix:
            return images, labels, 1.0
        stream = generator(self.recipe.seed, "cutmix", self.global_step, self.global_rank)
        if self.recipe.cutmix <= float(torch.rand((), generator=stream)):
            return images, labels, 1.0
        images, order, own = cutmix(images, stream)
        return images, labels[order], own

    def _add(self, name: str, value: Tensor, samples: int) -> None:
        if name not in self.sums:
            self.sums[name] = torch.zeros_like(value), 0.0
        total, before = self.sums[name]
        self.sums[name] = torch.add(total, value, alpha=samples), before + samples

    def _see_gradient(self, gradient: Tensor) -> None:
        self.share = (gradient != 0).float().mean()

    def _seed_chance(self, purpose: str) -> None:
        key = (self.recipe.seed, purpose, self.global_step, self.global_rank)
        torch.manual_seed(generator(*key).initial_seed())

    def _accuracy(self, split: str) -> TopKAccuracy:
        metric = self.accuracies[f"{split}_split"]
        assert isinstance(metric, TopKAccuracy)
        return metric

    def _log_accuracy(self, split: str) -> None:
        metric = self._accuracy(split)
        values = metric.compute()
        metric.reset()
        assert isinstance(values, dict)
        self.log_dict({f"{split}/{name}": value for name, value in values.items()})


def follow(averaged: nn.Module, network: nn.Module, decay: float, step: int) -> None:
    """Move averaged weights towards those of a network, faster in the first steps.

    Counts, as those of batch normalisation, are taken over.
    """
    mine, theirs = ([*each.parameters(), *each.buffers()] for each in (averaged, network))
    pairs = list(zip(mine, theirs, strict=True))
    moving = [pair for pair in pairs if pair[0].is_floating_point()]
    decay = min(decay, (1 + step) / (10 + step))
    update = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
    update([one for one, _ in moving], [other for _, other in moving], None)
    with torch.no_grad():
        for one, other in pairs:
            if not one.is_floating_point():
                one.copy_(other)


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
