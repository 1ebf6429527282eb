"""Settings, trainer and run folder, with your model by its import path; run it again to train longer (extra: eval)."""

from pathlib import Path

from torch import Tensor, nn

from hypersphere.training import Config, Run, Trainer, build_experiment

FOLDER = Path("runs/experiment")


class Net(nn.Module):
    def __init__(self, in_channels: int, width: int = 32) -> None:
        super().__init__()
        self.first = nn.Conv2d(in_channels, width, 3, padding=1)
        self.second = nn.Conv2d(width, 2 * width, 3, padding=1, stride=2)
        self.norms = nn.ModuleList([nn.BatchNorm2d(width), nn.BatchNorm2d(2 * width)])

    def forward(self, images: Tensor) -> Tensor:
        maps = self.norms[0](self.first(images)).relu()
        return self.norms[1](self.second(maps)).relu().flatten(1)


config = Config.of(
    {
        "data": "digits",
        "model": {"name": f"{Path(__file__).stem}:Net", "width": 16},
        "embedding": {"dim": 32},
        "head": {"name": "arcface", "s": 16.0, "m": 0.2},
        "regularizers": ["mhe"],
        "augment": [{"name": "shift", "pixels": 1}],
        "schedule": "constant",
        "validation": {"best": "accuracy"},
        "epochs": 6,
    }
)

if __name__ == "__main__":
    if (FOLDER / "config.json").exists():
        run = Run.open(FOLDER)
        run = run.with_config(run.config.patched({"epochs": run.config.epochs + 2}))
        experiment = run.build(trust_code=True)
    else:
        experiment = build_experiment(config)
        run = Run.of(FOLDER, experiment)
    trainer = Trainer(experiment, run)
    trainer.resume()
    trainer.train()
    print(f"accuracy {100 * trainer.metrics['accuracy']:.1f} %")
