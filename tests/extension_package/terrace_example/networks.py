"""A network without hidden layers."""

from torch import Tensor, nn


class Linear(nn.Module):  # type: ignore[misc]  # torch's classes are Any here
    def __init__(self, classes: int, *, values: int = 3 * 32 * 32) -> None:
        super().__init__()
        self.feature_width = values
        self.flatten = nn.Flatten()
        self.classifier = nn.Linear(values, classes)

    def embed(self, images: Tensor) -> Tensor:
        features: Tensor = self.flatten(images)
        return features

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.embed(images))
        return logits
