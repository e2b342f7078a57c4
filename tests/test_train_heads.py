"""Last layers in one with the loss, and split over processes: the same training as without."""

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing import get_context, start_processes

import topklass
from sharded_messages import counted
from test_train_details import epochs
from test_train_engine import assert_same_weights, toy, train_until, weights
from topklass.functional import target_rank
from topklass.models.adapt import find_head
from topklass.train import Recipe, evaluate, load_run, train
from topklass.train.criterion import LOSSES
from topklass.train.divided import divide, join_when_saved, local, rows_of
from topklass.train.heads import FusedHead, Layer, PlainHead
from topklass.train.sharded_head import ShardedHead, all_rows, check_can_split
from topklass.train.sharding import Sharded, strategy
from topklass.train.signature import build_network, signature_of

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of Lightning and TensorBoard
    pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed"),
]
get_context("forkserver").set_forkserver_preload(["topklass.train.sharded_head"])
FSDP_ON_CPU = hasattr(torch.cpu.Stream, "record_event")  # since PyTorch 2.7
CLASSES, FEATURES = 7, 5
RECIPE = Recipe(k=2, epochs=3, batch_size=24, pad=1, learning_rate=0.02)


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(4, FEATURES), nn.Tanh(), nn.Linear(FEATURES, CLASSES)
    return nn.Sequential(*layers).double()


def assert_close_runs(one: Path, other: Path) -> None:
    """The same weights and metrics."""
    expected = weights(one)
    assert expected.keys() == weights(other).keys()
    for name, value in weights(other).items():
        torch.testing.assert_close(value, expected[name], atol=1e-5, rtol=1e-4, msg=name)
    for first, second in zip(epochs(one), epochs(other), strict=True):
        for name, value in first.items():
            assert second[name] == pytest.approx(value, abs=1e-4), name


def assert_close_runs_in_half_precision(one: Path, other: Path, recipe: Recipe) -> None:
    """About the same losses and changes of the weights, which rounding alone moves by 15 %."""
    first, second = weights(one), weights(other)
    for name, start in build_network(recipe, signature_of(recipe, toy())).state_dict().items():
        change, expected = (each[f"network.{name}"].double() - start for each in (second, first))
        assert (change - expected).norm() <= 0.25 * expected.norm(), name
    for epoch, same in zip(epochs(one), epochs(other), strict=True):
        for name in ("train/loss", "validation/loss"):
            assert same[name] == pytest.approx(epoch[name], abs=0.02), name


@pytest.mark.parametrize(
    "criterion",
    [
        topklass.SmoothTopKLoss(2, tau=0.5),
        topklass.ShortListLoss(3),
        topklass.TopKCrossEntropyLoss(1),
    ],
)
def test_a_fused_head(criterion, monkeypatch):
    monkeypatch.setattr("topklass.train.heads.RANK_BYTES", 4 * CLASSES * 2)  # two rows at a time
    images, labels = torch.randn(5, 4, dtype=torch.float64), torch.randint(CLASSES, (5,))
    plain, fused = network(), network()
    head = FusedHead(fused, CLASSES)
    output = fused(images)
    assert isinstance(output, Layer)
    assert torch.equal(head.ranks(output, labels), target_rank(plain(images), labels))
    loss, expected = head.loss(criterion, output, labels), criterion(plain(images), labels)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    for mine, theirs in zip(fused.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    fused.eval()
    assert torch.equal(fused(images), plain(images))
    assert torch.equal(head.ranks(fused(images), labels), target_rank(plain(images), labels))
    torch.testing.assert_close(head.loss(criterion, fused(images), labels), expected)


@pytest.mark.parametrize("loss", [name for name, info in LOSSES.items() if info.fused])
def test_training_with_a_fused_head(loss, tmp_path):
    recipe = RECIPE.with_changes({"loss": loss, "epochs": 2})
    for name in ("plain", "fused"):
        changed = recipe.with_changes({"fused_head": name == "fused"})
        train(changed, tmp_path / name, dataset=toy())
    assert_close_runs(tmp_path / "plain", tmp_path / "fused")


def check(rank: int, ranks: int, folder: str) -> None:
    """A network of which each process has a part of the last layer, and its own samples."""
    torch.set_num_threads(1)
    store, timeout = f"file://{folder}/store", timedelta(seconds=60)
    dist.init_process_group("gloo", store, timeout, rank=rank, world_size=ranks)
    torch.manual_seed(1)
    images = torch.randn(6, 4, dtype=torch.float64)
    labels = torch.randint(CLASSES, (6,))
    own = slice(3 * rank, 3 * rank + 3)

    whole, split = network(), network()
    state = {name: value.clone() for name, value in whole.state_dict().items()}
    head = ShardedHead(split, CLASSES, init_device_mesh("cpu", (ranks,)))
    assert split[2].weight.to_local().shape == ((4, 3)[rank], FEATURES)
    criterion = topklass.SmoothTopKLoss(2)
    sent: list[tuple[str, int]] = []
    with counted(sent):
        output = split(images[own])
        targets = head.targets(labels[own])
        found = head.ranks(output, targets)
        loss, expected = head.loss(criterion, output, targets), criterion(whole(images), labels)
        loss.backward()
    assert sent == [
        ("gather", 3 * FEATURES * 8),
        ("gather", 3 * 8),
        ("gather", 6 * 2 * 8),
        ("reduce", 6 * 2 * 8),
        ("gather", 1024),
        ("gather", 6 * (2 * 2 + 4) * 8),
        ("reduce", 6 * FEATURES * 8),
    ]
    assert torch.equal(found, target_rank(whole(images), labels)[own])
    torch.testing.assert_close(loss, expected)
    expected.backward()
    for name in ("weight", "bias"):
        part = divide(getattr(whole[2], name).grad, head.mesh)
        torch.testing.assert_close(getattr(split[2], name).grad, part)
    for mine, theirs in zip(split[0].parameters(), whole[0].parameters(), strict=True):
        dist.all_reduce(mine.grad)
        torch.testing.assert_close(mine.grad / ranks, theirs.grad)  # as DDP averages

    shares = torch.rand(6, 2, dtype=torch.float64)
    few = topklass.SparseTarget(torch.stack([labels, labels.flip(0)], 1), shares)
    mine = head.targets(topklass.SparseTarget(*(each[own] for each in few)))
    assert all(map(torch.equal, mine, few))
    torch.testing.assert_close(head.loss(criterion, output, mine), criterion(whole(images), few))
    assert torch.equal(head.ranks(output, mine), found)

    whole.zero_grad(), split.zero_grad()
    criterion(whole(images), labels).backward()
    split.float()
    with torch.autocast("cpu", torch.bfloat16):
        output = split(images[own].float())
        assert output.dtype == torch.bfloat16
        head.loss(criterion, output, head.targets(labels[own])).backward()
    dist.all_reduce(split[0].weight.grad.div_(ranks))  # as DDP averages
    for mine, theirs in (
        (split[2], divide(whole[2].weight.grad, head.mesh)),
        (split[0], whole[0].weight.grad),
    ):
        difference = local(mine.weight.grad) - local(theirs)
        assert difference.abs().max() < 0.02 * local(theirs).abs().max()

    other = network().eval()
    head = head.with_network(other)
    own = slice(4 * rank, 4 + 2 * rank)  # not as many samples for each
    assert torch.equal(all_rows(labels[own], [4, 2]), labels)
    found = head.ranks(other(images[own]), head.targets(labels[own]))
    assert torch.equal(found, target_rank(whole(images), labels)[own])
    join_when_saved(other)
    saved = other.state_dict()
    if rank == 0:
        assert all(torch.equal(saved[name], value) for name, value in state.items())
    ranks_of_samples = torch.arange(5)[rank::ranks]
    assert head.in_order(ranks_of_samples).tolist() == [*range(5)]


def test_a_sharded_head(tmp_path):
    start_processes(check, (2, str(tmp_path)), 2, start_method="forkserver")


def test_which_classes_a_process_has():
    sizes = [len(rows_of(rank, 4, 5)) for rank in range(4)]
    assert sizes == [len(part) for part in torch.arange(5).chunk(4)] + [0]
    check_can_split(network(), CLASSES, CLASSES)
    recipe = Recipe(k=2, batch_size=14, shard_classes=True, devices=7)
    with pytest.raises(ValueError, match="got 6 classes for 7 processes: take fewer devices"):
        train(recipe, "none", dataset=toy())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shard_classes": True, "loss": "hinge"}, "works with the losses short-list, cross-entr"),
        ({"shard_classes": True, "loss": "noised", "samples": 0}, "needs sampled noise"),
        ({"shard_classes": True, "compile": True}, "that is not compiled: leave out compile"),
        ({"shard_classes": True, "strategy": "fsdp2"}, "needs strategy auto, ddp or fsdp"),
        ({"shard_classes": True, "precision": "16-mixed"}, "needs precision 32-true or bf16"),
        ({"shard_classes": True, "k": 33}, "needs k up to 32"),
        ({"shard_classes": True, "fused_head": True}, "exclude each other: leave one"),
        ({"fused_head": True, "loss": "noised"}, "fused_head works with the losses short-list"),
        (
            {"fused_head": True, "head": "cosine"},
            "shard_classes also takes cosine",
        ),
        ({"fused_head": True, "logit_adjustment": 1.0}, "fused_head needs no logit_adjustment"),
    ],
)
def test_settings_that_exclude_each_other(changes, message):
    with pytest.raises(ValueError, match=message):
        Recipe(**changes)


def test_networks_without_a_linear_layer():
    with pytest.raises(ValueError, match="no linear layer with 3 outputs"):
        find_head(nn.Conv2d(1, 3, 1), 3)
    cosine = nn.Sequential(topklass.CosineClassifier(4, 3))
    with pytest.raises(ValueError, match="got CosineClassifier: take head=linear"):
        FusedHead(cosine, 3)


def test_one_process_is_as_without(tmp_path):
    recipe = RECIPE.with_changes({"shard_classes": True, "epochs": 1})
    assert strategy(recipe) == "auto"
    assert isinstance(strategy(recipe.with_changes({"devices": 2})), Sharded)
    train(recipe, tmp_path / "sharded", dataset=toy())
    train(recipe.with_changes({"shard_classes": False}), tmp_path / "plain", dataset=toy())
    assert_same_weights(tmp_path / "plain", tmp_path / "sharded")


SCRIPT = """
import os, sys, warnings; warnings.simplefilter("ignore")
from pathlib import Path
import pytest, torch
import test_train_engine as t
from contextlib import nullcontext
from test_train_heads import CASES, RECIPE, kinds
from topklass.train import engine, sharding
from topklass.train.processes import disconnect

def build(*arguments, **options):  # other layouts round otherwise, which a kink amplifies
    return build_network(*arguments, **options).to(memory_format=torch.contiguous_format)

build_network, engine.build_network = engine.build_network, build
sharding.PIECE = 1000  # several pieces
folder, stop, names = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
for name in names:
    devices = {"devices": int(os.environ["WORLD_SIZE"])}
    for kind, settings in kinds(name).items():
        changes = {**devices, **CASES[name], **settings}
        with pytest.MonkeyPatch.context() as patched:
            if stop:
                t.stop_at(patched, stop, None)
            with pytest.raises(t.Interrupted) if stop else nullcontext():
                recipe, run = RECIPE.with_changes(changes), folder / f"{name} {kind}"
                t.train(recipe, run, dataset=t.toy(), resume=bool(stop))
disconnect()
"""
CASES = {
    "smooth, averaged": {"loss": "smooth", "ema": 0.9},
    "smooth, not matched": {"loss": "smooth", "match": False},
    "short list": {"loss": "short-list"},
    "cross-entropy": {"loss": "cross-entropy", "label_smoothing": 0.1, "logit_adjustment": 1.0},
    "lists": {"loss": "topk-cross-entropy", "reweight_from": 0.5, "average": "macro"},
    "ldam": {"loss": "ldam", "head": "cosine", "epochs": 1},  # a scale of 30 amplifies rounding
    "noised": {"loss": "noised", "epsilon": 0.0, "samples": 2},
    "mixed": {"loss": "short-list", "cutmix": 0.7},
    "half": {"loss": "smooth", "precision": "bf16-mixed", "epochs": 1},
}
"""What is trained with and without."""
ALSO_WITH_FSDP = ("smooth, averaged", "ldam", "mixed", "half")


def kinds(name: str) -> dict[str, dict[str, object]]:
    """The settings of each run of a case."""
    split: dict[str, object] = {"shard_classes": True}
    both = {"plain": {}, "sharded": split}
    fsdp = {"fully sharded": {**split, "strategy": "fsdp"}}
    return both | fsdp if name in ALSO_WITH_FSDP and FSDP_ON_CPU else both


def run_script(folder: Path, processes: int, stop: int, *names: str) -> None:
    """Train some of the cases; or if they are to stop at a step, continue them until then."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    done = subprocess.run(
        [sys.executable, *launch, str(script), str(folder), str(stop), *names],
        env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr.decode()[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "names"),
    [(2, CASES), (4, ("smooth, averaged", "cross-entropy", "ldam", "mixed"))],
)
def test_several_processes(processes, names, tmp_path):
    """The same weights and metrics as plain data parallel; with four, one has no class."""
    run_script(tmp_path, processes, 0, *names)
    for name in names:
        plain, *others = (tmp_path / f"{name} {kind}" for kind in kinds(name))
        for other in others:
            if name == "half":
                recipe = RECIPE.with_changes(CASES[name])
                assert_close_runs_in_half_precision(plain, other, recipe)
            else:
                assert_close_runs(plain, other)
    runs = (load_run(tmp_path / f"mixed {kind}", toy()) for kind in kinds("mixed"))
    one, *others = (evaluate(run)["accuracy"] for run in runs)
    assert all(other == one for other in others)


@pytest.mark.slow
def test_other_numbers_of_processes_continue(tmp_path, monkeypatch):
    """One, two, four, and one again: the same as plain data parallel; there are 12 steps."""
    name = "smooth, averaged"
    runs = [tmp_path / f"{name} {kind}" for kind in kinds(name)]
    recipe = RECIPE.with_changes(CASES[name])
    for run in runs:
        train_until(monkeypatch, 3, recipe, run)
    run_script(tmp_path, 2, 5, name)
    run_script(tmp_path, 4, 9, name)
    for run in runs:
        train(recipe, run, dataset=toy(), resume=True)
    plain, *others = runs
    for other in others:
        assert_close_runs(plain, other)


def test_a_plain_head():
    head, logits, labels = PlainHead(), torch.randn(3, 4), torch.tensor([0, 1, 2])
    expected = topklass.SmoothTopKLoss(2)(logits, labels)
    assert head.loss(topklass.SmoothTopKLoss(2), logits, labels) == expected
    assert head.in_order(labels) is labels
