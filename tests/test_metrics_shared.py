"""What all metrics share: any division into batches and processes, torchmetrics, errors."""

import copy
import importlib
import itertools
import pickle
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torchmetrics import MetricCollection

from synchronisation import no_synchronisation
from test_bad_input import raises
from test_metrics import METRICS, C, every_metric, problem, same, value
from test_topk_accuracy import Unseen
from topklass.metrics import AverageKAccuracy, SetCoverage, SetSize, TopKAccuracy


@every_metric
def test_any_batches(name):
    preds, target = problem(name)
    metric = METRICS[name]()
    expected = value(METRICS[name](), (preds, target))
    same(value(metric, *zip(preds.split(7), target.split(7), strict=True)), expected)
    metric.reset()
    order = torch.randperm(len(target))
    batches = zip(preds[order].tensor_split(5), target[order].tensor_split(5), strict=True)
    same(value(metric, (preds[:0], target[:0]), *batches), expected)


@every_metric
def test_ignored_targets(name):
    preds, target = problem(name)
    counted = target != -100
    same(
        value(METRICS[name](), (preds, target)),
        value(METRICS[name](), (preds[counted], target[counted])),
    )


@pytest.mark.parametrize("wrong", [C, 10**12, -1])
def test_target_out_of_range_where_nobody_looks(wrong):
    """It is wrong, and counts."""
    target = torch.tensor([0, 1, wrong, -100]).as_subclass(Unseen)
    for metric in (TopKAccuracy(C, C), AverageKAccuracy(C)):
        assert value(metric, (torch.zeros(4, C), target)) == pytest.approx(2 / 3)
    sets = torch.ones(4, C, dtype=torch.bool)
    assert value(SetCoverage(C), (sets, target)) == pytest.approx(2 / 3)
    assert value(SetSize(), (sets, target)) == C


@every_metric
def test_no_samples(name):
    preds, target = problem(name)
    for batch in ((preds[:0], target[:0]), (preds, torch.full_like(target, -100))):
        result = value(METRICS[name](), batch)
        for each in result.values() if isinstance(result, dict) else [result]:
            assert each.isnan().all()


@every_metric
def test_forward_gives_the_batch(name):
    preds, target = problem(name)
    metric = METRICS[name]()
    for batch in zip(preds.split(20), target.split(20), strict=True):
        same(metric(*batch), value(METRICS[name](), batch))
    same(metric.compute(), value(METRICS[name](), (preds, target)))


@every_metric
def test_copies_and_states(name):
    preds, target = problem(name)
    first, second = (preds[:30], target[:30]), (preds[30:], target[30:])
    metric = METRICS[name]()
    metric.persistent(True)
    metric.update(*first)
    restored = METRICS[name]()
    restored.persistent(True)
    restored.load_state_dict(metric.state_dict())
    restored._update_count = 1
    expected = value(METRICS[name](), (preds, target))
    for other in (pickle.loads(pickle.dumps(metric)), copy.deepcopy(metric), restored, metric):
        same(value(other, second), expected)
    metric.reset()
    same(value(metric, second), value(METRICS[name](), second))


@every_metric
def test_moves(name):
    metric, batch = METRICS[name](), problem(name)
    same(value(metric.to("cpu").half().double(), batch), value(METRICS[name](), batch))
    moved = metric.to("meta")
    states = [getattr(moved, state) for state in moved._defaults]
    assert all(state.is_meta and state.dtype == torch.long for state in states)


@every_metric
def test_no_values_are_read(name):
    """Tensors without values will do: nothing waits for a device."""
    metric, batch = METRICS[name]().to("meta"), [tensor.to("meta") for tensor in problem(name)]
    result = value(metric, batch)
    for each in result.values() if isinstance(result, dict) else [result]:
        assert each.is_meta


@every_metric
def test_updates_after_inference_mode(name):
    metric, batch = METRICS[name](), problem(name)
    with torch.inference_mode():
        metric.update(*batch)
        metric.reset()
    same(value(metric, batch), value(METRICS[name](), batch))


def test_collection():
    preds, target = problem("top-k")
    collection = MetricCollection(
        {"a": TopKAccuracy(C, 1), "b": AverageKAccuracy((1, 2)), "c": TopKAccuracy(C, (1, 3))}
    )
    batch = collection(preds[:30], target[:30])
    same(batch["top3"], value(TopKAccuracy(C, 3), (preds[:30], target[:30])))
    collection.update(logits=preds[30:], target=target[30:])
    result = collection.compute()
    assert result.keys() == {"a", "average1", "average2", "top1", "top3"}
    same(result["a"], value(TopKAccuracy(C, 1), (preds, target)))
    same(result["average2"], value(AverageKAccuracy(2), (preds, target)))
    same(result["top3"], value(TopKAccuracy(C, 3), (preds, target)))


def test_collection_of_metrics_with_equal_first_batches():
    """No label is right in the first batch; states that are equal then must not be shared."""
    metrics = {
        "top1": TopKAccuracy(C, 1),
        "top2": TopKAccuracy(C, 2),
        "all": TopKAccuracy(C, 2, ignore_index=-1),
    }
    collection = MetricCollection(metrics)
    preds = torch.arange(float(C)).expand(3, C)
    collection.update(preds, torch.tensor([0, 1, 2]))
    collection.update(preds[:2], torch.tensor([C - 2, C - 2]))
    assert collection.compute() == {"top1": 0, "top2": 0.4, "all": 0.4}


def test_collection_shares_counts():
    """Averages of the same counts are one group, updated once."""
    metrics = {average: TopKAccuracy(C, 2, average) for average in ("micro", "macro", "weighted")}
    collection = MetricCollection(metrics)
    preds, target = problem("top-k")
    for batch in zip(preds.split(20), target.split(20), strict=True):
        collection.update(*batch)
    assert collection.compute_groups == {0: ["macro", "micro", "weighted"]}
    for average, result in collection.compute().items():
        same(result, value(TopKAccuracy(C, 2, average), (preds, target)))


# Several processes

SHARES = {"unequal": (0, 45, 60), "none for one": (0, 60, 60)}


def in_process(rank: int, folder: str) -> None:
    """Compute each metric from this process's share of the samples."""
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    results = {}
    for name, (share, bounds) in itertools.product(METRICS, SHARES.items()):
        metric, rows = METRICS[name](), slice(bounds[rank], bounds[rank + 1])
        preds, target = (tensor[rows] for tensor in problem(name))
        if len(target):
            for batch in zip(preds.split(20), target.split(20), strict=True):
                metric.update(*batch)
        results[name, share] = metric.compute()
    torch.save(results, f"{folder}/{rank}")
    dist.destroy_process_group()


@every_metric
@pytest.mark.parametrize("share", SHARES)
def test_states_of_two_processes(name, share):
    """What the other process would send, without one."""
    preds, target = problem(name)
    first, second = METRICS[name](), METRICS[name]()
    for metric, start, end in zip((first, second), SHARES[share], SHARES[share][1:], strict=False):
        metric.update(preds[start:end], target[start:end])
    sent = iter([getattr(second, state) for state in second._reductions])
    first.dist_sync_fn = lambda state, group: [state, next(sent)]
    first.distributed_available_fn = lambda: True
    same(first.compute(), value(METRICS[name](), (preds, target)))


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_available(), reason="PyTorch is built without torch.distributed")
def test_two_processes(tmp_path):
    torch.multiprocessing.spawn(in_process, (str(tmp_path),), nprocs=2)
    for rank in range(2):
        results = torch.load(tmp_path / str(rank))
        assert len(results) == len(METRICS) * len(SHARES)
        for (name, _), result in results.items():
            same(result, value(METRICS[name](), problem(name)))


# Bad input


def test_missing_torchmetrics(monkeypatch):
    """The error says how to install it."""
    loaded = [name for name in sys.modules if name.split(".")[0] == "torchmetrics"]
    for name in [*loaded, "topklass.metrics"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchmetrics", None)
    with raises(ModuleNotFoundError, "needs torchmetrics: pip install 'topklass[metrics]'"):
        importlib.import_module("topklass.metrics")


@pytest.mark.slow
def test_needs_torchmetrics_alone():
    """Torchmetrics is not imported before it is used, and nothing else of the extra ``train``."""
    script = (
        "import sys, topklass\n"
        "assert 'torchmetrics' not in sys.modules and 'metrics' in dir(topklass)\n"
        "import torchmetrics\n"  # and what it finds, such as transformers
        "sys.modules |= dict.fromkeys(['lightning', 'rich', 'typer', 'yaml', 'jinja2'])\n"
        "assert topklass.metrics.TopKAccuracy(3, 1).k == 1\n"
        "extra = [f'topklass.{name}' for name in ('data', 'models', 'train', 'report', 'cli')]\n"
        "assert not set(extra) & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_parameters():
    with raises(ValueError, "k=5", "from 1 to 4", "number of classes"):
        TopKAccuracy(4)
    with raises(TypeError, "num_classes must be an integer", "2.5"):
        SetCoverage(2.5)
    for metric in (TopKAccuracy, SetCoverage):
        with raises(ValueError, "micro, macro, weighted, none, None", "samples"):
            metric(10, average="samples")
    for k, error in ((0, ValueError), ((1, 2.0), TypeError), ((), ValueError)):
        with raises(error, "k"):
            AverageKAccuracy(k)
    with pytest.raises(ValueError, match="size_average"):
        TopKAccuracy(10, size_average=True)


def test_number_of_classes():
    target = torch.tensor([0, 1])
    with raises(ValueError, "num_classes=10", "6 classes"):
        TopKAccuracy(10).update(torch.randn(2, C), target)
    with raises(ValueError, "num_classes=10", "6 classes"):
        SetCoverage(10).update(torch.ones(2, C, dtype=torch.bool), target)
    with raises(ValueError, "k=7", "from 1 to 6"):
        AverageKAccuracy((1, 7)).update(torch.randn(2, C), target)


@every_metric
def test_target(name):
    preds, target = problem(name)
    with raises(ValueError, "target", "(60,)", "(59,)"):
        METRICS[name]().update(preds, target[:-1])
    with raises(TypeError, "class indices", "probabilities"):
        METRICS[name]().update(preds, torch.rand(preds.shape))
    target[4] = C
    with raises(IndexError, "from 0 to 5", "got 6"):
        METRICS[name]().update(preds, target)


@pytest.mark.parametrize("name", ["coverage", "size"])
def test_sets(name):
    target = torch.tensor([0, 1])
    with raises(TypeError, "sets", "boolean", "torch.float32"):
        METRICS[name]().update(torch.ones(2, C), target)
    with raises(TypeError, "sets", "boolean", "list"):
        METRICS[name]().update([[True]], target)
    with raises(RuntimeError, "(2, 6)", "(2, 6, 3)"):
        METRICS[name]().update(torch.ones(2, C, 3, dtype=torch.bool), target)
    with raises(ValueError, "dimension of classes", "()"):
        METRICS[name]().update(torch.tensor(True), target[0])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@every_metric
def test_cuda(name):
    """The same as on the CPU, without waiting for the device."""
    batch = problem(name)
    expected = value(METRICS[name](), batch)
    metric, on_device = METRICS[name]().to("cuda"), [tensor.cuda() for tensor in batch]
    with no_synchronisation():
        result = value(metric, on_device)
    result = {n: v.cpu() for n, v in result.items()} if isinstance(result, dict) else result.cpu()
    torch.testing.assert_close(result, expected, equal_nan=True)
