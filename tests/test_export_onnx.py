"""``predict_topk`` exported to ONNX with a dynamic batch, in onnxruntime against eager mode."""

import math
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from topklass import predict_topk

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

C = 12
OPTIONS = {
    "one crop": {"k": 3},
    "marginals": {"k": 3, "crop_dim": 1},
    "marginals, k = 11": {"k": 11, "crop_dim": 1, "temperature": 2.0},
    "all classes": {"k": C, "crop_dim": 1},
    "softmax": {"k": 3, "crop_dim": 1, "method": "softmax"},
    "classes in dimension 1": {"k": 3, "dim": 1, "crop_dim": 2},
}

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # PyTorch 2.6 about its own graph
]


class Predictor(nn.Module):
    """The end of a model that is deployed."""

    def __init__(self, **options: int | float | str) -> None:
        super().__init__()
        self.options = options

    def forward(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        labels, probabilities = predict_topk(logits, **self.options)
        return labels, probabilities


@cache
def exported(name: str) -> "onnxruntime.InferenceSession":
    """One session for all tests of the same options."""
    options = OPTIONS[name]
    example = torch.randn(4, C, 3) if "dim" in options else torch.randn(4, 3, C)
    batch = {"logits": {0: torch.export.Dim("batch", max=2**31)}}
    program = torch.export.export(Predictor(**options), (example,), dynamic_shapes=batch)
    onnx = torch.onnx.export(program, dynamo=True, verbose=False)
    return onnxruntime.InferenceSession(onnx.model_proto.SerializeToString())


def batches() -> dict[str, Tensor]:
    ties = torch.randn(9, 3, C).round()
    absent = ties.masked_fill(torch.rand(9, 3, C) < 0.3, -math.inf)
    absent[0], absent[1, :, 2:], absent[2, 1] = -math.inf, -math.inf, -math.inf
    return {
        "random": 4 * torch.randn(9, 3, C),
        "ties": ties,
        "constant": torch.zeros(2, 3, C),
        "absent": absent,
        "one row": torch.randn(1, 3, C),
        "many rows": torch.randn(3000, 3, C),
        "certain": 300 * torch.randn(9, 3, C),
    }


slow = {
    name: pytest.param(name, marks=pytest.mark.slow)
    for name in OPTIONS
    if name not in ("marginals", "softmax")
}


@pytest.mark.parametrize("name", [slow.get(name, name) for name in OPTIONS])
def test_onnx(name):
    """The same labels, ties included, and probabilities."""
    session, eager = exported(name), Predictor(**OPTIONS[name])
    for logits in batches().values():
        logits = logits.movedim(-1, 1) if "dim" in OPTIONS[name] else logits
        feed = {session.get_inputs()[0].name: logits.contiguous().numpy()}
        labels, probabilities = (torch.from_numpy(out) for out in session.run(None, feed))
        expected_labels, expected = eager(logits)
        torch.testing.assert_close(probabilities, expected, rtol=1e-6, atol=1e-7)
        assert torch.equal(labels, expected_labels)
