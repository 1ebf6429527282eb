"""A head and an energy in the trainer of pytorch-metric-learning, with its sampler and miner (extras eval, compare)."""

import logging

import torch
from pytorch_metric_learning import distances, losses, miners, samplers, testers, trainers
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
from pytorch_metric_learning.utils.inference import CustomKNN
from torch import Tensor, nn

import hypersphere as hs


class Objective(nn.Module):
    """The sum of a head's loss, a triplet loss on the mined triplets, and an energy."""

    def __init__(self, head: nn.Module, triplets: nn.Module, energy: nn.Module) -> None:
        super().__init__()
        self.head, self.triplets, self.energy = head, triplets, energy

    def forward(self, embeddings: Tensor, labels: Tensor, indices_tuple: tuple[Tensor, ...] | None = None) -> Tensor:
        return self.head(embeddings, labels) + self.triplets(embeddings, labels, indices_tuple) + self.energy()


if __name__ == "__main__":
    logging.getLogger("pytorch-metric-learning").setLevel(logging.WARNING)
    torch.manual_seed(0)
    train, test = hs.data.digits("train"), hs.data.digits("test")
    model = hs.models.EmbeddingCNN(in_channels=1, image_size=(8, 8), feature_dim=16, widths=(16, 32))
    cosine = distances.CosineSimilarity()
    objective = Objective(
        hs.heads.am_softmax(16, 10, s=30, m=0.35),
        losses.TripletMarginLoss(margin=0.1, distance=cosine),
        hs.energy.MHE(model, output_layer=None),
    )
    trainer = trainers.MetricLossOnly(
        models={"trunk": model},
        optimizers={
            "trunk_optimizer": torch.optim.Adam(model.parameters(), lr=3e-3),
            "metric_loss_optimizer": torch.optim.Adam(objective.parameters(), lr=3e-3),
        },
        batch_size=64,
        loss_funcs={"metric_loss": objective},
        mining_funcs={"tuple_miner": miners.MultiSimilarityMiner()},
        sampler=samplers.MPerClassSampler(train.labels, m=4, length_before_new_iter=len(train)),
        dataset=train,
        dataloader_num_workers=0,
    )
    trainer.train(num_epochs=5)

    nearest = AccuracyCalculator(include=("precision_at_1",), k=1, knn_func=CustomKNN(cosine))
    tester = testers.GlobalEmbeddingSpaceTester(batch_size=500, dataloader_num_workers=0, accuracy_calculator=nearest)
    accuracies = tester.test({"train": train, "test": test}, 5, model, splits_to_eval=[("test", ["train"])])
    print(f"accuracy {100 * accuracies['test']['precision_at_1_level0']:.1f} %")
