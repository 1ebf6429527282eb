"""A head that Accelerate prepares together with the model (extra: eval; pip install accelerate)."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader

import hypersphere as hs

set_seed(0)
accelerator = Accelerator(cpu=True)  # remove cpu=True to use accelerators
model = hs.models.EmbeddingCNN(in_channels=1, image_size=(8, 8), feature_dim=16, widths=(16, 32))
head = hs.heads.arcface(16, 10, s=30, m=0.3)
optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()], lr=3e-3)
train = DataLoader(hs.data.digits("train"), batch_size=64, shuffle=True)
test = DataLoader(hs.data.digits("test"), batch_size=100)
model, head, optimizer, train, test = accelerator.prepare(model, head, optimizer, train, test)

for _ in range(8):
    for images, labels in train:
        loss = head(model(images), labels)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()

model.eval()
scores = accelerator.unwrap_model(head).scores  # wrappers expose only `forward`
correct = total = 0
with torch.no_grad():
    for images, labels in test:
        predictions = scores(model(images)).argmax(1)
        predictions, labels = accelerator.gather_for_metrics((predictions, labels))
        correct, total = correct + int((predictions == labels).sum()), total + len(labels)
accelerator.print(f"accuracy {100 * correct / total:.1f} %")
