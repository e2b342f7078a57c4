"""Hugging Face's Trainer: ``python examples/programs/hf_sequence_classification.py``.

A small BERT with random weights, seconds on a CPU. Nothing is downloaded. There are twelve classes
in four groups of three that share their words: at best the first guess is right for a third of the
texts, and a list of three for all.
"""

from tempfile import TemporaryDirectory

import torch
from confused import CLASSES, report
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

# --8<-- [start:loss]
import topklass
from topklass.integrations import hf_loss


def make_trainer(model, args, train_dataset):
    criterion = topklass.ShortListLoss(k=3)
    loss = hf_loss(criterion)  # right with gradient accumulation, too
    return Trainer(model, args, train_dataset=train_dataset, compute_loss_func=loss)
    # --8<-- [end:loss]


WORDS = 10
"""Of a group; the words of group g are the tokens from 10 g to 10 g + 9."""


def texts(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Eight words each, half of them of the label's group."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    own = WORDS * (labels // 3)[:, None] + torch.randint(WORDS, (count, 4), generator=generator)
    any_group = torch.randint(WORDS * CLASSES // 3, (count, 4), generator=generator)
    tokens = torch.cat([own, any_group], dim=1)
    return [{"input_ids": x, "labels": y} for x, y in zip(tokens, labels, strict=True)]


def main() -> None:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=WORDS * CLASSES // 3,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=8,
        num_labels=CLASSES,
    )
    with TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder,
            num_train_epochs=4,
            per_device_train_batch_size=16,
            gradient_accumulation_steps=2,
            learning_rate=0.01,
            save_strategy="no",
            report_to="none",
        )
        trainer = make_trainer(BertForSequenceClassification(config), args, texts(1200, seed=1))
        trainer.train()
        found = trainer.predict(texts(600, seed=2))
    report(torch.from_numpy(found.predictions), torch.from_numpy(found.label_ids))


if __name__ == "__main__":
    main()
