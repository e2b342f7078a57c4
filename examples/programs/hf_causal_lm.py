"""A causal language model: ``python examples/programs/hf_causal_lm.py``.

A small GPT-2 with random weights, seconds on a CPU. Nothing is downloaded. Each token has three
successors, equally likely: at best the first guess is right for a third of the tokens, and a list
of three for all.
"""

from tempfile import TemporaryDirectory

import torch
from confused import report
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

# --8<-- [start:loss]
import topklass
from topklass.integrations import hf_loss


def make_trainer(model, args, train_dataset):
    criterion = topklass.TopKCrossEntropyLoss(k=3)
    loss = hf_loss(criterion, shift=True)  # the logits at a token predict the next one
    return Trainer(model, args, train_dataset=train_dataset, compute_loss_func=loss)
    # --8<-- [end:loss]


VOCABULARY, LENGTH = 30, 16


def sentences(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Walks from token to token."""
    generator = torch.Generator().manual_seed(0)
    successors = torch.rand(VOCABULARY, VOCABULARY, generator=generator).topk(3).indices
    generator.manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (count, LENGTH), generator=generator)
    for t in range(1, LENGTH):
        choice = torch.randint(3, (count,), generator=generator)
        tokens[:, t] = successors[tokens[:, t - 1], choice]
    return [{"input_ids": x, "labels": x} for x in tokens]


def main() -> None:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=32,
        n_layer=1,
        n_head=2,
        bos_token_id=None,
        eos_token_id=None,
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
        trainer = make_trainer(GPT2LMHeadModel(config), args, sentences(800, seed=1))
        trainer.train()
        found = trainer.predict(sentences(200, seed=2))
    logits, labels = torch.from_numpy(found.predictions), torch.from_numpy(found.label_ids)
    report(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


if __name__ == "__main__":
    main()
