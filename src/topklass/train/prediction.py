"""Short lists for image files, by a finished run; its training data is not needed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from topklass import predict_topk
from topklass._extras import extra
from topklass.data import ImageFiles
from topklass.data.files import SUFFIXES, is_image_name
from topklass.train.criterion import build_loss, loss_info
from topklass.train.engine import SIGNATURE
from topklass.train.evaluation import best_device
from topklass.train.file_batches import FileEvaluationBatches
from topklass.train.file_views import centre, worker_count
from topklass.train.recipe import Recipe
from topklass.train.restore import load_best, read_recipe
from topklass.train.signature import Signature, load_signature

AT_ONCE = 64


class Guesses(NamedTuple):
    """The list for an image."""

    path: str
    """The file."""
    classes: tuple[str, ...]
    """Names, the most probable first."""
    probabilities: tuple[float, ...]
    """What :func:`explain_probabilities` says."""


@torch.no_grad()
def predict(
    run: str | Path, paths: Sequence[str | PathLike[str]], k: int | None = None
) -> list[Guesses]:
    """The short lists of a run for image files.

    Images of any size and mode become what the network was trained on: of a run on image files the
    crop at the centre; of a run on small images the largest part of that shape, resized, and grey
    where these were.

    Args:
        run: folder of a finished run.
        paths: image files; a folder stands for all images in it and below.
        k: length of the lists, by default that of the recipe.

    Returns:
        The list of each image. Probabilities are those of :func:`topklass.predict_topk`: for a loss
        without k the softmax, for a top-k loss the probability that the class belongs to the top k,
        at the temperature of the loss.
    """
    run = Path(run)
    recipe, signature = read_recipe(run), load_signature(run / SIGNATURE)
    files = image_files(paths)
    network = load_best(run, recipe, signature).to(best_device()).eval()
    labels = torch.zeros(len(files), dtype=torch.int64)
    pictures, view = ImageFiles(files), partial(network_input, signature=signature)
    batches = FileEvaluationBatches(pictures, labels, AT_ONCE, view, worker_count(recipe))
    length, scale = recipe.k if k is None else k, scale_of(recipe, len(signature.classes))
    lists: list[tuple[list[int], list[float]]] = []
    for images, _ in batches:
        logits = network(images.to(best_device())).float().cpu()
        top = predict_topk(logits, length, **scale)
        lists += zip(top.labels.tolist(), top.probabilities.tolist(), strict=True)
    return [
        Guesses(path, tuple(signature.classes[label] for label in found), tuple(probable))
        for path, (found, probable) in zip(files, lists, strict=True)
    ]


def explain_probabilities(recipe: Recipe, k: int) -> str:
    """What the probabilities of a list are, in words."""
    if loss_info(recipe.loss).takes_k:
        return f"probability of belonging to the top {k}"
    return "probability of being the class"


def scale_of(recipe: Recipe, classes: int) -> dict[str, Any]:
    """How :func:`topklass.predict_topk` makes probabilities of the scores that a loss has trained.

    Cross-entropy trains a softmax, a loss for cosine scores one of scaled scores; the smooth loss
    weighs lists by exp(s / (kτ)). Other losses know no temperature: 1.
    """
    counts, options = torch.ones(classes), recipe.loss_options()
    criterion = build_loss(recipe.loss, recipe.k, counts, options, match=recipe.match)
    method = "marginals" if loss_info(recipe.loss).takes_k else "softmax"
    return {"method": method, "temperature": getattr(criterion, "temperature", 1.0)}


def image_files(paths: Iterable[str | PathLike[str]]) -> list[str]:
    """The files, with those of folders."""
    files: list[str] = []
    for path in map(Path, paths):
        if not path.exists():
            raise FileNotFoundError(f"there is no image {path}")
        found = [path]
        if path.is_dir():
            below = (p for p in path.rglob("*") if is_image_name(p.name))
            found = sorted(p for p in below if not p.is_dir())
        if not found:
            raise FileNotFoundError(f"{path} has no images ({', '.join(SUFFIXES)})")
        files += map(str, found)
    return files


def network_input(picture: Any, signature: Signature) -> Tensor:
    """What a network takes of a picture."""
    picture = picture.convert("L" if signature.channels == 1 else "RGB")
    if signature.resize is not None:
        return centre(picture, resize=signature.resize, crop=signature.height)
    size, smooth = (signature.width, signature.height), extra("PIL.Image").BILINEAR
    small = extra("PIL.ImageOps").fit(picture, size, smooth)
    image: Tensor = extra("torchvision.transforms.v2.functional").pil_to_tensor(small)
    return image
