"""A head and an energy in a LightningModule (extra: eval; pip install lightning)."""

import lightning
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import hypersphere as hs


class Recogniser(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = hs.models.EmbeddingCNN(in_channels=1, image_size=(8, 8), feature_dim=16, widths=(16, 32))
        self.head = hs.heads.a_softmax(16, 10, m=4, annealing=hs.heads.Annealing(start=100, gamma=0.5, end=1))
        self.energy = hs.energy.MHE(self.model, output_layer=None)

    def forward(self, images: Tensor) -> Tensor:
        return self.head.scores(self.model(images))

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        return self.head(self.model(images), labels) + self.energy()

    def test_step(self, batch: tuple[Tensor, Tensor]) -> None:
        images, labels = batch
        self.log("accuracy", (self(images).argmax(1) == labels).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(hs.optim.param_groups(self, weight_decay=1e-4), lr=3e-3)


if __name__ == "__main__":
    lightning.seed_everything(0, verbose=False)
    trainer = lightning.Trainer(
        max_epochs=6,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    recogniser = Recogniser()
    trainer.fit(recogniser, DataLoader(hs.data.digits("train"), batch_size=64, shuffle=True))
    (result,) = trainer.test(recogniser, DataLoader(hs.data.digits("test"), batch_size=500), verbose=False)
    print(f"accuracy {100 * result['accuracy']:.1f} %")
