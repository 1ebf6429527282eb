import pytest

from hypersphere.cli.settings import changed_settings
from hypersphere.training import Config, Run
from hypersphere.training.settings_file import is_config_of_run, read_settings


def test_read_settings_accepts_aliases_and_merged_keys(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text("head: &head {name: arcface, m: 0.2}\nmodel: {<<: *head, m: 0.3}\ndata: *head\n")
    settings = read_settings(path)
    assert settings["model"] == {"name": "arcface", "m": 0.3}
    assert settings["data"] == settings["head"] == {"name": "arcface", "m": 0.2}
    path.write_text("")
    assert read_settings(path) == {}


def test_config_read_accepts_yaml_json_and_the_config_of_a_run(tmp_path):
    (tmp_path / "job.yaml").write_text("head: {name: arcface, m: 1e-1}\nepochs: 2\n")
    (tmp_path / "job.json").write_text('{"head": {"name": "arcface", "m": 0.1}, "epochs": 2}')
    config = Config.of({"head": {"name": "arcface", "m": 0.1}, "epochs": 2})
    run = Run.create(tmp_path / "run", config)
    assert (
        Config.read(tmp_path / "job.yaml") == Config.read(str(tmp_path / "job.json")) == Config.read(run.path) == config
    )
    assert is_config_of_run(run.path)
    assert not is_config_of_run(tmp_path / "job.json")


@pytest.mark.parametrize("text", ["optimizer: {lr: 5e-4}", "optimizer: {name: adamw, lr: 5e-4}"])
def test_config_read_equals_the_config_of_the_command_line(text, tmp_path):
    (tmp_path / "job.yaml").write_text(text)
    config = Config.read(tmp_path / "job.yaml")
    assert config.optimizer.options == {"lr": 5e-4, "weight_decay": 1e-4}
    assert changed_settings(Config().settings(), tmp_path / "job.yaml", {}) == config.settings()
    # The settings of a run are complete: no default option is added to them.
    run = Run.create(tmp_path / "run", Config.of({"optimizer": {"name": "adamw", "lr": 0.1}}))
    assert changed_settings(Config().settings(), run.path, {}) == Config.read(run.path).settings()
    assert Config.read(run.path) == run.config


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("job.txt", "", "a settings file must be a file with suffix .json, .yaml, .yml, not"),
        ("job.json", "[1]", "job.json must be a mapping of settings, not"),
        ("job.yaml", "1: a", "job.yaml must be a mapping of settings, not"),
        ("job.yaml", "a: {b", "job.yaml cannot be read: "),
    ],
)
def test_config_read_names_the_file_and_the_reason(name, content, message, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        Config.read(tmp_path / name)
