"""Command line: ``python -m benchmarks`` with ``speed``, ``study``, ``noise`` and others."""

import argparse
import os

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # its workers would disturb the times

import torch

from benchmarks import (
    algorithm_pictures,
    linear,
    long_tail,
    loss_pictures,
    many_classes,
    noise,
    prediction,
    sharded,
    speed,
    study,
    tables,
)
from benchmarks.environment import default_device


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    commands = parser.add_subparsers(dest="command", required=True)
    measured = {
        "speed": commands.add_parser("speed", help="losses: time, memory, error"),
        "study": commands.add_parser("study", help="the papers' algorithms, Tables 3 to 5"),
    }
    for command in measured.values():
        command.add_argument("--device", choices=("cpu", "cuda"), default=default_device())
        command.add_argument("--quick", action="store_true", help="a small part, to try it out")
    predicted = commands.add_parser("prediction", help="lists and sets of labels, saved logits")
    predicted.add_argument("--logits", nargs="+", required=True, metavar="FILE")
    predicted.add_argument("--quick", action="store_true", help="one split, to try it out")
    tails = commands.add_parser("long-tail", help="sets of labels of long tails, saved logits")
    tails.add_argument("--logits", nargs="+", required=True, metavar="FILE")
    tails.add_argument("--quick", action="store_true", help="one split, to try it out")
    noises = commands.add_parser("noise", help="noise against its exact expectation, on the CPU")
    noises.add_argument("--quick", action="store_true", help="few draws and steps, to try it out")
    layers = {
        "linear": commands.add_parser("linear", help="a last layer and its loss: time, memory"),
        "sharded": commands.add_parser("sharded", help="what ranks exchange: bytes, time"),
    }
    for command in layers.values():
        command.add_argument("--device", choices=("cpu", "cuda"), default=default_device())
        command.add_argument("--smoke", action="store_true", help="small layers, to try it out")
    many = commands.add_parser("many-classes", help="training with 2,000 classes, on the CPU")
    many.add_argument("--quick", action="store_true", help="100 classes, one epoch, to try it out")
    commands.add_parser("tables", help="tables and plots of the documents from the results")
    commands.add_parser("pictures", help="losses and the algorithm, for the documents")
    arguments = parser.parse_args()
    if arguments.command == "tables":
        tables.main()
    elif arguments.command == "pictures":
        loss_pictures.main()
        algorithm_pictures.main()
    elif arguments.command == "prediction":
        prediction.main(arguments.logits, arguments.quick)
    elif arguments.command == "long-tail":
        long_tail.main(arguments.logits, arguments.quick)
    elif arguments.command in layers:
        measure = {"linear": linear.main, "sharded": sharded.main}[arguments.command]
        measure(torch.device(arguments.device), arguments.smoke)
    elif arguments.command == "many-classes":
        many_classes.main(arguments.quick)
    elif arguments.command == "noise":
        noise.main(arguments.quick)
    else:
        run = {"speed": speed.main, "study": study.main}[arguments.command]
        run(arguments.device, arguments.quick)


if __name__ == "__main__":
    main()
