import pytest
import torch

from hypersphere.evaluation import verify
from hypersphere.models import EmbeddingCNN
from hypersphere.recipes.open_set import SLOW, TRAINING, ShiftedBatches, make_head, objectives, train_embedding
from hypersphere.training import Batches, embed


def strokes(per_class=12, classes=6, seed=0):
    """Return noisy 8×8 images whose class is the position of a bar."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(classes).repeat_interleave(per_class)
    images = torch.randint(0, 90, (len(labels), 1, 8, 8), generator=generator, dtype=torch.uint8)
    for index, label in enumerate(labels.tolist()):
        images[index, 0, label, :] = 255
    return images, labels


SMALL = {**TRAINING, "epochs": 12, "widths": [8, 8], "feature_dim": 8, "batch_size": 24, "shift": 0}


@pytest.mark.parametrize("row", objectives(SLOW), ids=lambda row: row.name)
def test_train_embedding_learns_with_every_objective(row):
    torch.manual_seed(0)
    images, labels = strokes()
    model, head, losses = train_embedding({**SMALL, **row.settings}, images, labels, 0, lambda part: None)
    assert len(losses) == 12
    assert losses[-1] < losses[0] or head.energy_weight or head.annealing  # a growing margin increases the loss
    features, again = embed(model, Batches(*strokes(seed=1), 24))
    first, second = torch.triu_indices(len(again), len(again), 1)
    verification = verify(features[first], features[second], again[first] == again[second])
    assert verification.auc > 0.8


def test_shifted_batches_move_images_without_losing_pixels():
    images, labels = strokes()
    generator = torch.Generator().manual_seed(0)
    moved = [x for x, _ in ShiftedBatches(Batches(images, labels, 24), 2, generator)]
    still = [x for x, _ in Batches(images, labels, 24)]
    assert any(not torch.equal(a, b) for a, b in zip(moved, still, strict=True))
    for a, b in zip(moved, still, strict=True):
        assert torch.equal(a.flatten(1).sort().values, b.flatten(1).sort().values)


def test_open_set_recipes_reject_invalid_settings():
    with pytest.raises(ValueError, match="head must be one of softmax"):
        make_head({"head": "nonsense", "options": {}}, 8, 6)
    with pytest.raises(ValueError, match="image_size must be at least 8 in height and width"):
        EmbeddingCNN(1, (4, 4))
