"""Texts with labels as vectors: CLINC150 and BANKING77, queries and what they ask for."""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from topklass.data import Dataset, Split, Superclasses
from topklass.data.seeds import generator

QUERIES, DOMAINS = "data_full.json", "domains.json"
SPLITS = {"train": "train", "validation": "val", "test": "test"}
BANKING = {"train": "train.csv", "test": "test.csv"}
"""The files of BANKING77, which has no validation texts."""
FEATURES = 256
"""Dimensions of the vectors."""

Texts = Sequence[tuple[str, str]]
"""Texts and the names of their classes."""


class Vectors:
    """Vectors in the place of pictures."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]

    def take(self, indices: Tensor) -> Vectors:
        """Those at the indices."""
        return Vectors(self.rows[indices])


def read_texts(folder: Path) -> tuple[Dataset, str]:
    """CLINC150 or BANKING77 as vectors, and a hash of the test texts.

    Args:
        folder: of the published data set, with ``train.csv`` and ``test.csv`` of BANKING77, or
            ``data_full.json`` and ``domains.json`` of CLINC150, whose queries out of scope are left
            out.
    """
    return _banking(folder) if (folder / BANKING["train"]).is_file() else _queries(folder)


def _banking(folder: Path) -> tuple[Dataset, str]:
    texts = {}
    for split, name in BANKING.items():
        with (folder / name).open(encoding="utf-8", newline="") as file:
            texts[split] = [(row["text"], row["category"]) for row in csv.DictReader(file)]
    names = tuple(sorted({label for _, label in texts["train"]}))
    return vectors(texts, names, {}), digest(texts["test"])


def _queries(folder: Path) -> tuple[Dataset, str]:
    content, domains = (_read_json(folder / name) for name in (QUERIES, DOMAINS))
    names = tuple(name for domain in domains.values() for name in domain)
    of_class = [number for number, each in enumerate(domains.values()) for _ in each]
    divisions = {"domain": Superclasses(tuple(domains), torch.tensor(of_class))}
    texts = {name: content[key] for name, key in SPLITS.items()}
    return vectors(texts, names, divisions), digest(texts["test"])


def made_up(classes: int = 20, per_class: int = 12) -> tuple[Dataset, str]:
    """A few texts of words that belong to their classes, and of words that do not.

    Example:
        >>> data, _ = made_up()
        >>> len(data.classes), data.counts[0], data.train.images.rows.shape
        (20, tensor(12), torch.Size([240, 32]))
    """
    names = tuple(f"class {number}" for number in range(classes))
    words = torch.randint(50, (3, per_class, classes, 4), generator=generator(0, "texts"))
    texts = {
        split: [
            (f"own{label} " + " ".join(f"word{number}" for number in numbers), names[label])
            for row in rows
            for label, numbers in enumerate(row)
        ]
        for split, rows in zip(SPLITS, words.tolist(), strict=True)
    }
    halves = Superclasses(("first", "second"), torch.arange(classes) * 2 // classes)
    return vectors(texts, names, {"half": halves}, features=32), digest(texts["test"])


def vectors(
    texts: Mapping[str, Texts],
    classes: tuple[str, ...],
    superclasses: Mapping[str, Superclasses],
    features: int = FEATURES,
) -> Dataset:
    """Latent semantic analysis: tf–idf of words and pairs of words, on its first singular vectors.

    Vocabulary, frequencies and singular vectors are those of the training texts. Words that occur
    in one text only are left out. The vectors have a standard deviation of 1 over all dimensions.
    """
    training = [terms(text) for text, _ in texts["train"]]
    documents = Counter(term for each in training for term in set(each))
    vocabulary = sorted(term for term, count in documents.items() if count > 1)
    counts = torch.tensor([documents[term] for term in vocabulary])
    idf = ((1 + len(training)) / (1 + counts)).log() + 1
    place = {term: number for number, term in enumerate(vocabulary)}
    found = {
        name: tf_idf((terms(text) for text, _ in each), place, idf) for name, each in texts.items()
    }
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        directions = torch.svd_lowrank(found["train"], features, niter=4)[2]
    projected = {name: rows @ directions for name, rows in found.items()}
    scale = projected["train"].std()
    number = {name: index for index, name in enumerate(classes)}
    splits: dict[str, Any] = {}
    for name, rows in projected.items():
        labels = torch.tensor([number[label] for _, label in texts[name]])
        splits[name] = Split(Vectors(rows / scale), labels)
    return Dataset("texts", classes=classes, superclasses=superclasses, **splits)


def terms(text: str) -> list[str]:
    """The words of a text, and the pairs of neighbours.

    Example:
        >>> terms("What's new?")
        ['<', "what's", 'new', '>', "< what's", "what's new", 'new >']
    """
    words = ["<", *re.findall(r"[a-z0-9']+", text.lower()), ">"]
    return words + [f"{one} {two}" for one, two in pairwise(words)]


def tf_idf(texts: Iterable[list[str]], place: dict[str, int], idf: Tensor) -> Tensor:
    """Frequencies of terms, weighted and normalised, a row for each text."""
    rows = []
    for each in texts:
        row = torch.zeros(len(place))
        for term in each:
            if term in place:
                row[place[term]] += 1
        rows.append(row)
    return F.normalize(torch.stack(rows) * idf)


def digest(texts: Texts) -> str:
    """A hash of texts and labels."""
    return blake2b(json.dumps(texts).encode(), digest_size=8).hexdigest()


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"there is no {path}")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found
