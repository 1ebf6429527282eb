"""Your model and your loop: energy, rotation and folding are one line each (extra: eval)."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import hypersphere as hs

torch.manual_seed(0)
train, test = hs.data.digits("train"), hs.data.digits("test")
loader = DataLoader(train, batch_size=64, shuffle=True)
model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Conv2d(16, 32, 3, padding=1),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(32 * 16, 10),
)

hs.rotation.rotate_(model, normalize=True)  # filters keep their angles and rotate together
energy = hs.energy.MHE(model, hidden=0.0, output=1.0)  # only the classes: rotations keep the energy of the rest

optimizer = torch.optim.Adam(hs.optim.param_groups(model, weight_decay=1e-4), lr=1e-2)
for _ in range(10):
    for images, labels in loader:
        loss = F.cross_entropy(model(images), labels) + energy()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

hs.rotation.fold_(model)  # plain convolutions again

images, labels = test.tensors()
accuracy = (model(images).argmax(1) == labels).float().mean().item()
print(f"accuracy {100 * accuracy:.1f} %")
