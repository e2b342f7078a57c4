"""Metrics over a data set: by hand, in any division into batches and processes, in torchmetrics."""

import copy
import importlib
import itertools
import math
import pickle
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from synchronisation import no_synchronisation
from test_bad_input import raises
from test_topk_accuracy import Unseen
from topklass.functional import topk_accuracy
from topklass.metrics import AverageKAccuracy, SetCoverage, SetSize, TopKAccuracy

C = 6
nan, inf = math.nan, math.inf

every_average = pytest.mark.parametrize("average", ["micro", "macro", "weighted", "none", None])
METRICS = {
    "top-k, one k": lambda: TopKAccuracy(C, 2),
    "top-k, micro": lambda: TopKAccuracy(C, (1, 3)),
    "top-k, macro": lambda: TopKAccuracy(C, (1, 3), "macro"),
    "top-k, none": lambda: TopKAccuracy(C, (1, 3), None),
    "average-K, one K": lambda: AverageKAccuracy(2),
    "average-K": lambda: AverageKAccuracy((1, 3)),
    "coverage": lambda: SetCoverage(C),
    "coverage, macro": lambda: SetCoverage(C, "macro"),
    "size": SetSize,
}
every_metric = pytest.mark.parametrize("name", METRICS)


def problem(name: str, samples: int = 60) -> tuple[Tensor, Tensor]:
    """Logits with ties, or sets, and targets some of which are ignored."""
    generator = torch.Generator().manual_seed(samples)
    logits = torch.randn(samples, C, generator=generator).mul(2).round()
    target = torch.randint(C, (samples,), generator=generator)
    target[::7] = -100
    return logits > 0 if name.startswith(("coverage", "size")) else logits, target


def same(actual: Tensor | dict[str, Tensor], expected: Tensor | dict[str, Tensor]) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def value(metric: Metric, *batches: tuple[Tensor, Tensor]) -> Tensor | dict[str, Tensor]:
    for batch in batches:
        metric.update(*batch)
    return metric.compute()


# Values


@every_average
@pytest.mark.parametrize("shape", [(C,), (50, C), (10, C, 5)], ids=str)
def test_topk_accuracy_is_that_of_the_function(shape, average):
    input = torch.randint(4, shape).float()
    target = torch.randint(C, shape[:0] if len(shape) == 1 else shape[:1] + shape[2:])
    several = value(TopKAccuracy(C, (1, 4, C), average), (input, target))
    expected = topk_accuracy(input, target, (1, 4, C), average=average)
    same(several, {"top1": expected[0], "top4": expected[1], "top6": expected[2]})
    same(value(TopKAccuracy(C, 4, average), (input, target)), expected[1])


def pooled(log_p: Tensor, target: Tensor, k: int) -> float:
    """Average-K accuracy by sorting the scores of all samples."""
    threshold = log_p.flatten().sort(descending=True).values[k * len(log_p) - 1]
    reached = log_p.gather(1, target[:, None]) >= threshold
    return reached.double().mean().item()


def rounded(log_p: Tensor) -> Tensor:
    """Logarithms cut to 14 binary digits, in numbers."""
    mantissa, exponent = torch.frexp(-log_p.double())
    return -torch.ldexp((mantissa * 2**14).floor() / 2**14, exponent)


@pytest.mark.parametrize(
    ("classes", "scale"), [(2, 0.1), (2, 30.0), (5, 0.0), (5, 3.0), (300, 0.1), (300, 3.0)]
)
def test_average_k_by_sorting(classes, scale):
    logits, target = scale * torch.randn(400, classes), torch.randint(classes, (400,))
    target[::2] = logits[::2].argmax(1)
    ks = sorted({1, 2, (classes + 1) // 2, classes - 1, classes})
    result = value(AverageKAccuracy(ks), *zip(logits.split(77), target.split(77), strict=True))
    log_p = logits.log_softmax(1)
    for k in ks:
        assert result[f"average{k}"].item() == pytest.approx(pooled(rounded(log_p), target, k))
        assert abs(result[f"average{k}"].item() - pooled(log_p, target, k)) < 1.5 / 400


def test_average_k_known_values():
    """The ambiguous sample has three labels, the certain one a single one: two on average."""
    logits = torch.tensor([[9.0, 1.0, 0.0, 0.0], [2.1, 2.0, 1.9, -3.0]])
    for target, expected in (([0, 2], 1.0), ([0, 3], 0.5), ([1, 0], 0.5), ([1, 3], 0.0)):
        assert value(AverageKAccuracy(2), (logits, torch.tensor(target))) == expected


def test_average_k_is_better_than_top_k_where_ambiguity_varies():
    logits = torch.randn(500, 20) * torch.linspace(0, 10, 500)[:, None]
    target = logits.softmax(1).multinomial(1).squeeze(1)
    for k in (1, 3, 10):
        average, top = (
            value(AverageKAccuracy(k), (logits, target)),
            topk_accuracy(logits, target, k),
        )
        assert average >= top if k == 1 else average > top


def test_average_k_ties_are_right():
    assert value(AverageKAccuracy(1), (torch.zeros(5, C), torch.randint(C, (5,)))) == 1


def test_average_k_of_sure_samples():
    """Probabilities that float32 rounds to one, and others far below its smallest number."""
    logits = 1000.0 * torch.eye(C)
    logits[:, -1] -= 1.0
    assert value(AverageKAccuracy(1), (logits, torch.arange(C))) == 1
    assert value(AverageKAccuracy(1), (logits, (torch.arange(C) + 1) % C)) == 0
    assert value(AverageKAccuracy(C), (logits, (torch.arange(C) + 1) % C)) == 1


@pytest.mark.parametrize("bad", [nan, inf])
def test_average_k_without_a_softmax(bad):
    logits, target = torch.zeros(4, C), torch.tensor([0, 1, 2, 3])
    logits[1, 4] = bad
    assert value(AverageKAccuracy(C), (logits, target)) == 0.75


def test_average_k_of_absent_labels():
    logits, target = torch.zeros(4, C), torch.tensor([0, 1, 2, 3])
    logits[:, 3] = -inf
    assert value(AverageKAccuracy(C), (logits, target)) == 0.75
    logits[2] = -inf
    assert value(AverageKAccuracy(C), (logits, target)) == 0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_average_k_in_other_precisions(dtype):
    logits, target = torch.randn(2000, 50).to(dtype), torch.randint(50, (2000,))
    result = value(AverageKAccuracy((1, 9)), (logits, target))
    log_p = logits.double().log_softmax(1)
    for k in (1, 9):
        assert abs(result[f"average{k}"].item() - pooled(log_p, target, k)) < 1.5 / 2000


@every_average
def test_coverage_by_hand(average):
    sets, target = problem("coverage")
    sets, target = sets[target != C - 1], target[target != C - 1]
    kept = [(s, y) for s, y in zip(sets.tolist(), target.tolist(), strict=True) if y != -100]
    of_class = [[s[y] for s, y in kept if y == c] for c in range(C)]
    result = value(SetCoverage(C, average), (sets, target))
    means = [sum(hits) / len(hits) if hits else nan for hits in of_class]
    expected = {
        "micro": sum(map(sum, of_class)) / sum(map(len, of_class)),
        "macro": sum(means[:-1]) / (C - 1),
        "none": means,
    }
    expected |= {"weighted": expected["micro"], None: means}
    torch.testing.assert_close(result, torch.tensor(expected[average]), equal_nan=True)


def test_size_by_hand():
    sets, target = problem("size")
    kept = [sum(s) for s, y in zip(sets.tolist(), target.tolist(), strict=True) if y != -100]
    assert value(SetSize(), (sets, target)).item() == pytest.approx(sum(kept) / len(kept))


def test_one_set():
    for label, covered in ((1, 1), (2, 0)):
        sets, target = torch.tensor([True, True, False]), torch.tensor(label)
        assert value(SetCoverage(3), (sets, target)) == covered
        assert value(SetSize(), (sets, target)) == 2


# Where the classes are


@pytest.mark.parametrize(
    "make",
    [
        lambda dim: TopKAccuracy(C, (1, 3), dim=dim),
        lambda dim: TopKAccuracy(C, 2, "macro", dim=dim),
        lambda dim: AverageKAccuracy((1, 3), dim=dim),
        lambda dim: SetCoverage(C, dim=dim),
        lambda dim: SetSize(dim=dim),
    ],
    ids=["top-k", "macro", "average-K", "coverage", "size"],
)
def test_dim(make):
    """Sequences as long as there are classes: only ``dim`` tells them apart."""
    logits, target = torch.randn(5, C, C), torch.randint(C, (5, C))
    target[0] = -100
    sets = isinstance(make(1), SetCoverage | SetSize)
    last = logits > 0 if sets else logits
    expected = value(make(1), (last.flatten(0, 1), target.flatten()))
    same(value(make(-1), (last, target)), expected)
    same(value(make(2), (last, target)), expected)
    same(value(make(1), (last.movedim(-1, 1), target)), expected)
    same(value(make(0), (last.movedim(-1, 0), target)), expected)
    same(value(make(-1), (last[1, 2], target[1, 2])), value(make(1), (last[1, 2], target[1, 2])))
    with raises(IndexError, "dim=3", "from -3 to 2"):
        make(3).update(last, target)


def test_default_dimensions():
    """Logits as in cross-entropy; masks as sets return them, classes last."""
    assert TopKAccuracy(C).dim == AverageKAccuracy().dim == 1
    assert SetCoverage(C).dim == SetSize().dim == -1


def test_collection_of_metrics_with_different_dimensions():
    """Equal counts in the first batch; states must not be shared."""
    collection = MetricCollection({"1": TopKAccuracy(2, 1), "2": TopKAccuracy(2, 1, dim=-1)})
    logits, target = torch.zeros(1, 2, 2), torch.tensor([[0, 1]])
    collection.update(logits, target)
    logits[0] = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    collection.update(logits, target)
    assert collection.compute() == {"1": 0.75, "2": 1.0}


# Predicted labels


@every_average
@pytest.mark.parametrize("shape", [(), (50,), (10, 5)], ids=str)
def test_predicted_labels(shape, average):
    target, labels = torch.randint(C - 1, (2, *shape))
    logits = torch.nn.functional.one_hot(labels, C).float()
    if shape:
        target.view(-1)[::3] = -100
    expected = topk_accuracy(logits, target, 1, average, dim=-1)
    same(value(TopKAccuracy(C, 1, average), (labels, target)), expected)
    same(value(TopKAccuracy(C, 1, average), (labels.int(), target)), expected)
    several = value(TopKAccuracy(C, (1,), average), (labels, target))
    same(several, {"top1": expected})


def test_predicted_labels_that_are_no_classes_are_wrong():
    target = torch.tensor([0, 1, C - 1, -100])
    assert value(TopKAccuracy(C, 1), (torch.tensor([-1, 1, C, -100]), target)) == 1 / 3


def test_bad_predicted_labels():
    labels, target = torch.tensor([0, 1]), torch.tensor([0, 1])
    with raises(ValueError, "target's shape (2,)", "(2, 1)"):
        TopKAccuracy(C, 1).update(labels[:, None], target)
    with raises(RuntimeError, "class indices", "torch.float32"):
        TopKAccuracy(C, 1).update(labels, target.float())
    with raises(TypeError, "target", "list"):
        TopKAccuracy(C, 1).update(labels, [0, 1])
    with raises(IndexError, "from 0 to 5", "got 6"):
        TopKAccuracy(C, 1).update(labels, target + 5)
    with raises(ValueError, "pass num_classes"):
        topk_accuracy(labels, target, 1)
    with raises(NotImplementedError, "floating-point", "torch.int64"):
        AverageKAccuracy(1).update(labels, target)


# What all metrics share


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


@pytest.fixture
def without_torchmetrics(monkeypatch):
    """As before its first import."""
    loaded = [name for name in sys.modules if name.split(".")[0] == "torchmetrics"]
    for name in [*loaded, "topklass.metrics"]:
        monkeypatch.delitem(sys.modules, name)
    return monkeypatch


def test_missing_torchmetrics(without_torchmetrics):
    """The error says how to install it."""
    without_torchmetrics.setitem(sys.modules, "torchmetrics", None)
    with raises(ModuleNotFoundError, "needs torchmetrics: pip install 'topklass[metrics]'"):
        importlib.import_module("topklass.metrics")


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("import nowhere", "ModuleNotFoundError: No module named 'nowhere'"),
        ("import torchmetrics.x", "ModuleNotFoundError: No module named 'torchmetrics.x'"),
        ("raise ImportError('libx.so')", "ImportError: libx.so"),
    ],
)
def test_other_errors_of_torchmetrics(tmp_path, without_torchmetrics, code, error):
    """A torchmetrics that is there, but cannot be imported, is not called missing."""
    (tmp_path / "torchmetrics").mkdir()
    (tmp_path / "torchmetrics" / "__init__.py").write_text(code)
    without_torchmetrics.syspath_prepend(tmp_path)
    with pytest.raises(ImportError) as raised:
        importlib.import_module("topklass.metrics")
    assert f"{type(raised.value).__name__}: {raised.value}" == error


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
