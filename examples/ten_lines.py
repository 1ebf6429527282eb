"""Train an embedding with a margin head from any DataLoader, and classify with it (extra: eval)."""

import torch
from torch.utils.data import DataLoader

import hypersphere as hs

torch.manual_seed(0)
train, test = hs.data.digits("train"), hs.data.digits("test")
model = hs.models.EmbeddingCNN(in_channels=1, image_size=(8, 8), feature_dim=16, widths=(16, 32))
head = hs.heads.am_softmax(16, 10, s=30, m=0.35)
optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()], lr=3e-3)

hs.training.fit(model, head, DataLoader(train, batch_size=64, shuffle=True), epochs=8, optimizer=optimizer)

features, labels = hs.training.embed(model, DataLoader(test, batch_size=500))
accuracy = (hs.training.predict(head, features) == labels).float().mean().item()
print(f"accuracy {100 * accuracy:.1f} %")
