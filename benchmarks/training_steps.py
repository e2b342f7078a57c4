"""A training step with each of several losses, label smoothing among them."""

from statistics import median

from benchmarks.candidates import BASE, SMOOTHED, with_smoothing
from benchmarks.rows import Row, digits


def training_steps(quick: bool) -> list[Row]:
    """Times of a step of ResNet-18, eager, 32 × 32 images; ratios to cross-entropy's."""
    from experiments.step_time import Setting, epoch_seconds, ratio

    if quick:
        setting = Setting("convnet", batch=4, images=8, classes=100, size=16, rounds=2)
    else:
        setting = Setting("resnet18-small", batch=256, images=10_240, classes=100, rounds=9)
    losses = {each.name: each.loss for each in with_smoothing()}
    seconds = epoch_seconds(setting, losses)
    rows: list[Row] = []
    for name, found in seconds.items():
        base = BASE + SMOOTHED if name.endswith(SMOOTHED) else BASE
        rows.append(
            {
                "model": setting.model,
                "batch": setting.batch,
                "loss": name,
                "milliseconds": digits(1e3 * median(found) / setting.steps, 5),
                "ratio": digits(ratio(found, [seconds[base]]), 5),
            }
        )
    return rows
