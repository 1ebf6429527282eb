import pickle
from dataclasses import replace

import pytest
import torch
from torch import nn

from hypersphere.data import DataSplit, Pairs, TensorSource
from hypersphere.data.pairs import draw_possible_pairs
from hypersphere.energy.energy import MAX_NEURONS
from hypersphere.evaluation import identify, retrieve, verify
from hypersphere.heads import ShardedHead, softmax
from hypersphere.training import Objective
from hypersphere.training.validation import (
    Accuracy,
    IdentificationProtocol,
    RetrievalProtocol,
    Validator,
    VerificationProtocol,
    gathered_class_vectors,
)


def features(people=8, each=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(people).repeat_interleave(each)
    centres = torch.randn(people, 6, generator=generator)
    return centres[labels] + 0.7 * torch.randn(len(labels), 6, generator=generator), labels


def split_of(x, labels):
    source = TensorSource(x, labels, [str(number) for number in range(int(labels.max()) + 1)])
    return DataSplit(source, source)


def test_protocols_agree_with_the_functions_of_evaluation():
    x, labels = features()
    split = split_of(x, labels)
    pairs = draw_possible_pairs(labels, 10, 300, 0)
    expected = verify(x[pairs.first], x[pairs.second], pairs.same, folds=10)  # eight classes: pairs of all classes
    found = VerificationProtocol()(x, labels, split)
    assert found == {"accuracy": expected.accuracy, "eer": expected.eer, "auc": expected.auc}
    gallery = torch.arange(0, 40, 5)
    probes = torch.tensor([place for place in range(40) if place % 5])
    found = RetrievalProtocol()(x, labels, split)
    assert found["map_at_r"] == retrieve(x, labels).map_at_r
    expected = identify(x[probes], labels[probes], x[gallery], labels[gallery], ranks=[1, 3])
    found = IdentificationProtocol(ranks=(1, 3))(x, labels, split)
    assert found == {"rank1": expected.accuracy[1], "rank3": expected.accuracy[3]}


@pytest.mark.parametrize(("people", "each"), [(2, 2), (3, 4), (10, 3), (40, 20)])
def test_drawn_pairs_fit_the_data(people, each):
    labels = torch.arange(people).repeat_interleave(each)
    pairs = draw_possible_pairs(labels, 10, 300, 0)
    assert pairs.folds == (10 if people >= 20 else 1)
    assert torch.equal(labels[pairs.first] == labels[pairs.second], pairs.same)
    for fold in range(pairs.folds):
        same = pairs.same[pairs.fold == fold]
        assert int(same.sum()) == int((~same).sum()) >= 1
    x = torch.randn(len(labels), 4)
    assert 0 <= VerificationProtocol()(x, labels, split_of(x, labels))["accuracy"] <= 1
    with pytest.raises(ValueError, match="need a class with two samples"):
        draw_possible_pairs(torch.arange(5), 10, 300, 0)


def test_verification_reads_pairs_from_a_file(tmp_path):
    x, labels = features(4, 3)
    names = [f"{label}/{place}.png" for place, label in enumerate(labels.tolist())]
    source = TensorSource(x, labels, list("abcd"), names)
    split = DataSplit(source, source, open_set=True)
    rows = []
    for first in range(12):
        for second in range(first):
            rows.append(f"{names[first]},{names[second]},{int(labels[first] == labels[second])},{first % 2}")
    (tmp_path / "pairs.csv").write_text("\n".join(rows) + "\n")
    found = VerificationProtocol(pairs=str(tmp_path / "pairs.csv"))(x, labels, split)
    first, second = torch.tril_indices(12, 12, -1)
    expected = verify(x[first], x[second], labels[first] == labels[second], folds=first % 2)
    assert found["auc"] == pytest.approx(expected.auc)
    assert found["accuracy"] == pytest.approx(expected.accuracy)


def test_verification_draws_no_pairs_of_unreadable_examples():
    """Their label is -100. Drawn as a class, they would replace other classes, and a fold could lack a kind."""
    x, labels = features(22, 3)
    labels[torch.arange(0, 66, 2)] = -100
    readable = (labels >= 0).nonzero().flatten()
    pairs = VerificationProtocol().chosen_pairs(labels, split_of(x, features(22, 3)[1]))
    assert torch.isin(torch.cat([pairs.first, pairs.second]), readable).all()
    drawn = draw_possible_pairs(labels[readable], 10, 300, 0)
    assert torch.equal(pairs.first, readable[drawn.first])
    assert pairs.folds == drawn.folds
    assert 0 <= VerificationProtocol()(x, labels, split_of(x, features(22, 3)[1]))["accuracy"] <= 1


def test_verification_ignores_folds_without_both_kinds_of_pairs():
    x, labels = features(4, 3)
    first, second = torch.tensor([0, 3, 0, 6, 9, 6]), torch.tensor([1, 4, 3, 7, 10, 9])
    pairs = Pairs(first, second, labels[first] == labels[second], torch.tensor([0, 0, 0, 1, 1, 1]))
    split = replace(split_of(x, labels), pairs=pairs)
    labels = labels.clone()
    labels[3] = -100  # leaves two same pairs in fold 1, one in fold 0, and no different pair in fold 0
    with pytest.raises(ValueError, match=r"verification pairs must be at least two of the same class and two of .* 1'"):
        VerificationProtocol()(x, labels, split)
    more = Pairs(
        torch.cat([first, torch.tensor([7])]),
        torch.cat([second, torch.tensor([11])]),
        torch.cat([pairs.same, torch.tensor([False])]),
        torch.cat([pairs.fold, torch.tensor([1])]),
    )
    metrics = VerificationProtocol()(x, labels, replace(split, pairs=more))
    assert 0 <= metrics["accuracy"] <= 1


def png(pixels):
    import io

    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels.numpy()).save(file, "png")
    return file.getvalue()


def test_validator_verifies_on_a_bin_file(tmp_path):
    """Pairs of insightface with their images, next to held-out images of the training classes."""
    generator = torch.Generator().manual_seed(0)
    people = torch.randint(40, 216, (24, 8, 8), generator=generator)
    photos = lambda person: (people[person] + torch.randint(-20, 20, (8, 8), generator=generator)).to(torch.uint8)  # noqa: E731
    ends = [(person, person if same else (person + 1) % 24) for person in range(24) for same in (True, False)]
    content = [png(photos(person)) for pair in ends for person in pair]
    with (tmp_path / "lfw.bin").open("wb") as file:
        pickle.dump((content, [True, False] * 24), file)
    pixels = torch.randint(256, (6, 1, 8, 8), dtype=torch.uint8, generator=generator)
    source = TensorSource(pixels, torch.arange(6) % 2, ("a", "b"))
    protocol = VerificationProtocol(pairs=str(tmp_path / "lfw.bin"))
    assert protocol.label == "verification.lfw"
    validator = Validator(DataSplit(source, source), {"accuracy": Accuracy(), protocol.label: protocol})
    objective = Objective(nn.Flatten(), softmax(64, 2))
    metrics = validator(objective)
    assert metrics["verification.lfw.auc"] > 0.95
    assert metrics.keys() == {
        "accuracy",
        "top5",
        "verification.lfw.accuracy",
        "verification.lfw.eer",
        "verification.lfw.auc",
        "energy",
    }


def test_validator_restores_the_mode_of_every_module():
    network = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4))
    network[2].eval()
    objective = Objective(network, softmax(4, 8))
    Validator(split_of(*features()), {"accuracy": Accuracy()})(objective)
    assert [module.training for module in network] == [True, True, False]
    assert objective.training
    objective.eval()
    Validator(split_of(*features()), {"accuracy": Accuracy()})(objective)
    assert not objective.training


@pytest.mark.parametrize("size", [1, 7, 39, 500])
def test_accuracy_does_not_depend_on_the_batch_size(size):
    x, labels = features()
    objective = Objective(nn.Linear(6, 4), softmax(4, 8))
    found = Validator(split_of(x, labels), {"accuracy": Accuracy(top=3)}, batch_size=size, energy=False)(objective)
    scores = objective.head.scores(objective.network(x))
    assert found["accuracy"] == pytest.approx((scores.argmax(1) == labels).double().mean().item())
    assert found["top3"] == pytest.approx(
        sum(int(y) in row for y, row in zip(labels, scores.topk(3)[1].tolist(), strict=True)) / 40
    )


@pytest.mark.parametrize("classes", [5, MAX_NEURONS, MAX_NEURONS + 1000])
def test_gathered_class_vectors_sample_does_not_depend_on_processes(classes):
    head = softmax(4, classes)
    vectors = gathered_class_vectors(head)
    chosen = torch.linspace(0, classes - 1, min(classes, MAX_NEURONS)).long()
    assert torch.equal(gathered_class_vectors(ShardedHead(head)), vectors[chosen])
