"""Metrics of language modelling."""

from __future__ import annotations

from torch import Tensor
from torchmetrics import MeanMetric


class Perplexity(MeanMetric):
    """exp of the mean loss per token, over all batches and ranks.

    Updated with (mean loss, number of targets) like `MeanMetric`: two scalars. `torchmetrics.text.Perplexity` takes
    the logits and a second softmax over the vocabulary for the same number.
    """

    def compute(self) -> Tensor:
        return super().compute().exp()
