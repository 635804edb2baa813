"""Where settings come from, who wins, and what is said about mistakes."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from node.commands.configuring import print_config
from node.commands.flags import load_with_flags
from node.config import Config
from node.config_sources import RECIPES, Loaded, flatten, load, load_run, parse_flag
from node.config_text import dump_toml, init_file, markdown
from node.datadir import DataDir
from node.errors import ConfigError
from p2p.ids import peer_id_of

TINY = {"SWARMNODE_MODEL__NAME": "tiny"}
ROOT = Path(__file__).parents[2]


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def source(loaded: Loaded, key: str) -> str:
    return next(str(setting.source) for setting in loaded.settings() if setting.key == key)


def complaint(**arguments: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load(**{"environ": TINY, **arguments})
    return str(caught.value)


def test_the_later_source_wins_and_every_value_knows_its_source(tmp_path: Path) -> None:
    file = write(
        tmp_path / "my.toml", "[training]\nlr = 0.5\nepochs = 2\nminibatches = 2\n[sampling]\ngroup_size = 4\n"
    )
    environ = {**TINY, "SWARMNODE_TRAINING__EPOCHS": "3", "SWARMNODE_TRAINING__MINIBATCHES": "3"}
    loaded = load([parse_flag("training.minibatches=4")], file=file, environ=environ)
    training = loaded.config.training
    assert (training.lr, training.epochs, training.minibatches, training.kl) == (0.5, 3, 4, 0.0)
    assert loaded.config.sampling.group_size == 4
    assert source(loaded, "training.lr") == f"file {file}:2"
    assert source(loaded, "training.epochs") == "environment SWARMNODE_TRAINING__EPOCHS"
    assert source(loaded, "training.minibatches") == "flag --set training.minibatches"
    assert source(loaded, "training.kl") == "default"
    assert source(loaded, "tasks.mix") == "recipe tiny"


def test_a_recipe_lies_below_the_file_and_belongs_to_the_model_that_wins(tmp_path: Path) -> None:
    file = write(tmp_path / "my.toml", '[model]\nname = "tiny"\n[lora]\nrank = 3\n[training]\n')
    loaded = load(file=file, environ={})
    assert loaded.config.prompt.shots == 0, "the recipe of tiny"
    assert loaded.config.lora.rank == 3, "the file over the recipe"
    assert source(loaded, "training.lr") == "recipe tiny", "an empty section takes nothing away"
    other = load(file=file, environ={"SWARMNODE_MODEL__NAME": "some/model-without-a-recipe"})
    assert other.config.prompt.shots == 1


def test_the_recipe_of_auto_follows_the_device(tmp_path: Path) -> None:
    file = write(tmp_path / "my.toml", '[model]\ndevice = "cuda"\n')
    assert source(load(file=file, environ={}), "tasks.mix") == "recipe qwen2.5-0.5b"
    on_cpu = {"SWARMNODE_MODEL__DEVICE": "cpu"}
    assert source(load(file=file, environ=on_cpu), "tasks.mix") == "recipe smollm2-135m", "the environment wins"
    assert source(load([parse_flag("model.name=tiny")], file=file, environ=on_cpu), "tasks.mix") == "recipe tiny"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[training]\nlrr = 1", "training.lrr: there is no such setting; did you mean training.lr? (file {file}:2)"),
        ("[trainng]\nlr = 1", "trainng: there is no such setting; did you mean training?"),
        ("\nlr = 1", "lr: there is no such setting; did you mean training.lr? (file {file}:2)"),
        ("[node]\nlr = 1", "node.lr: there is no such setting; did you mean training.lr? (file {file}:2)"),
        (
            '[[tasks.mix]]\nwieght = 2\nconfig = { dataset = "gcd" }',
            "tasks.mix[0].wieght: there is no such setting; did you mean tasks.mix.weight?",
        ),
        ("[training]\n\nlr = -1", "training.lr = -1 (file {file}:3): must be greater than 0"),
        ('[training]\nloss = "ppo"', "training.loss = \"ppo\" (file {file}:2): must be 'dapo', 'grpo' or 'dr_grpo'"),
        ('[training.lr]\nx = "y"', 'training.lr = {{"x": "y"}} (file {file}:2): must be a valid number'),
        ("[lora]\ntargets = 3", "lora.targets = 3 (file {file}:2): must be a valid string or must be a valid list"),
        ('[verifiers.commands.a]\nversion = "2"', "verifiers.commands.a.argv (file {file}:2): is required"),
        ("[training\n", "{file}: is not TOML"),
        ("x = " + "[" * 5000 + "]" * 5000, "{file}: is nested too deeply"),
        ("[verifiers.options.a]\nx = " + "[" * 100 + "]" * 100, "{file}: is nested too deeply"),
        ("[" + ".".join(["a"] * 2000) + "]\nx = 1", "{file}: is nested too deeply"),
        ("[training]\nlr = " + "1" * 5000, "{file}: holds a whole number with too many digits"),
        ("[training]\nlr = nan", "training.lr = NaN (file {file}:2): must be a finite number"),
        ("[verifiers]\nanswer_seconds = inf", "verifiers.answer_seconds = Infinity (file {file}:2): must be a finite"),
        (
            "[[tasks.mix]]\nweight = nan\nconfig = {}",
            "tasks.mix[0].weight = NaN (file {file}:1): must be a finite number",
        ),
        (
            "[pool]\nmax_groups = 9223372036854775808",
            "pool.max_groups = 9223372036854775808 (file {file}:2): must be less",
        ),
        ('[node]\ndata_dir = "a\\u0000b"', 'node.data_dir = "a\\u0000b" (file {file}:2): must not hold a zero byte'),
        ('[node]\ndata_dir = ""', 'node.data_dir = "" (file {file}:2): must name a directory'),
    ],
)
def test_a_mistake_in_the_file_is_one_line_with_key_place_and_remedy(tmp_path: Path, text: str, expected: str) -> None:
    file = write(tmp_path / "my.toml", text)
    message = complaint(file=file)
    assert message.startswith(expected.format(file=file))
    assert "\n" not in message


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("SWARMNODE_TRAINING__LRR", "1", "SWARMNODE_TRAINING__LRR: there is no such setting; did you mean SWARMNODE_"),
        ("SWARMNODE_TRAINING_LR", "1", "did you mean SWARMNODE_TRAINING__LR?"),
        ("SWARMNODE_LR", "1", "did you mean SWARMNODE_TRAINING__LR?"),
        ("SWARMNODE_NODE__LR", "1", "did you mean SWARMNODE_TRAINING__LR?"),
        ("SWARMNODE_ROLLOUTS__ENGINE", "vllm", "there is no such setting; names look like SWARMNODE_TRAINING__LR"),
        ("SWARMNODE_MODEL", "tiny", "model is a section; name a setting in it, such as model.name"),
        ("SWARMNODE_NETWORK__JOIN", "/ip4/1.2.3.4/tcp/1", 'must be JSON, such as ["text", "text"]'),
        ("SWARMNODE_NODE__SEED", "-1", 'node.seed = "-1" (environment SWARMNODE_NODE__SEED): must be greater'),
        ("SWARMNODE_TRAINING__BETAS", "0.9, 0.99", 'training.betas = "0.9, 0.99": must be JSON'),
    ],
)
def test_a_mistake_in_the_environment_names_the_variable(variable: str, value: str, expected: str) -> None:
    message = complaint(environ={**TINY, variable: value})
    assert expected in message
    assert variable in message


@pytest.mark.parametrize(
    ("flag", "expected"),
    [
        ("node.data_dir=~nosuchuser/x", "there is no home directory of the user in ~nosuchuser"),
        ("node.data_dir=/" + "a" * 5000, "is too long"),
        ("node.data_dir=" + "/a" * 2500, "is too long"),
        ("node.data_dir= ", "must name a directory"),
        ("model.name=~nosuchuser/x", "there is no such home directory"),
        ("tasks.mix=" + "[" * 5000, "is nested too deeply"),
        ("tasks.mix=" + "[" * 100 + "]" * 100, "is nested too deeply"),
    ],
)
def test_a_path_or_a_value_that_cannot_be_is_one_line(flag: str, expected: str) -> None:
    message = complaint(flags=[parse_flag(flag)]) if not flag.startswith("tasks") else str(refusal(flag))
    assert expected in message
    assert flag.partition("=")[0] in message
    assert "\n" not in message


def refusal(flag: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        parse_flag(flag)
    return caught.value


def test_a_byte_order_mark_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text("[sharing]\nlocal = 3\n", encoding="utf-8-sig")
    assert load(file=tmp_path / "my.toml", environ=TINY).config.sharing.local == 3


def test_the_default_data_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    at_home = tmp_path / "home" / ".local" / "share" / "swarmnode"
    for base, expected in (("", at_home), ("relative", at_home), (str(tmp_path), tmp_path / "swarmnode")):
        monkeypatch.setenv("XDG_DATA_HOME", base)
        assert load(environ=TINY).config.node.data_dir == expected
    # A container's user without an entry in /etc/passwd.
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)
    assert complaint() == "this user has no home directory: set HOME, or give --data-dir"
    assert load([parse_flag(f"node.data_dir={tmp_path}")], environ=TINY).config.node.data_dir == tmp_path


def test_several_mistakes_are_all_reported() -> None:
    environ = {**TINY, "SWARMNODE_TRAINING__LR": "fast", "SWARMNODE_SHARING__LOCAL": "0"}
    assert len(complaint(environ=environ).splitlines()) == 2


def test_the_environment_takes_lists_tables_and_nothing() -> None:
    environ = {
        **TINY,
        "SWARMNODE_TASKS__MIX": '[{"config": {"dataset": "gcd"}, "weight": 2}]',
        "SWARMNODE_LORA__TARGETS": '["q_proj", "v_proj"]',
        "SWARMNODE_TRAINING__BETAS": "[0.8, 0.9]",
        "SWARMNODE_VERIFIERS__COMMANDS__OTHER__ARGV": '["/usr/bin/python3", "env.py"]',
        "SWARMNODE_MODEL__REVISION": "none",
        "SWARMNODE_LOG__FORMAT": "json",
        "SWARMNODE_PROMPT__SHOTS": "1",
    }
    config = load(environ=environ).config
    assert [(entry.config, entry.weight) for entry in config.tasks.mix] == [({"dataset": "gcd"}, 2.0)]
    assert config.lora.targets == ["q_proj", "v_proj"]
    assert config.training.betas == (0.8, 0.9)
    assert config.verifiers.commands["other"].argv == ["/usr/bin/python3", "env.py"]
    assert config.model.revision is None
    assert (config.log.format, config.prompt.shots) == ("json", 1)


def test_variables_of_a_kubernetes_service_called_swarmnode_are_passed_over() -> None:
    environ = {
        **TINY,
        "SWARMNODE_SERVICE_HOST": "10.0.0.1",
        "SWARMNODE_SERVICE_PORT": "80",
        "SWARMNODE_PORT": "tcp://10.0.0.1:80",
        "SWARMNODE_PORT_80_TCP_ADDR": "10.0.0.1",
    }
    assert load(environ=environ).config.model.name == "tiny"


def test_the_file_may_be_named_by_a_variable_or_lie_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "swarmnode.toml", "[sharing]\nlocal = 2\n")
    named = write(tmp_path / "named.toml", "[sharing]\nlocal = 3\n")
    assert load(environ=TINY).config.sharing.local == 2
    assert load(environ={**TINY, "SWARMNODE_CONFIG": str(named)}).config.sharing.local == 3
    assert "cannot be read" in complaint(file=tmp_path / "missing.toml")


def test_the_configuration_as_run_comes_back_the_same(tmp_path: Path) -> None:
    config = load([parse_flag("node.seed=7"), parse_flag(f"node.data_dir={tmp_path}")], environ=TINY).config
    file = write(tmp_path / "config.toml", dump_toml(config))
    assert load_run(file).config == config
    changed = load_run(file, [parse_flag("evaluation.per_task=5")])
    assert changed.config.evaluation.per_task == 5
    assert changed.config.tasks == config.tasks


def test_the_file_of_init_is_valid_says_the_defaults_and_leaves_nothing_out() -> None:
    text = init_file()
    assert all(value == {} for value in tomllib.loads(text).values()), "everything is commented out"
    # Taking the # away from lines that set something gives the defaults.
    settings = re.sub(r"^#(?! [^ ])", "", text, flags=re.MULTILINE)
    read = dict(flatten(tomllib.loads(settings)))
    defaults = dict(flatten(Config().model_dump(mode="json")))
    unset = {path for path, value in defaults.items() if value is None} | {("node", "data_dir")}
    assert {path: value for path, value in defaults.items() if path not in unset} == read
    assert all(f"# {path[-1]} = ..." in text for path in unset)


def test_every_setting_is_explained() -> None:
    def unexplained(model: type[BaseModel], prefix: str) -> list[str]:
        missing = []
        for name, field in model.model_fields.items():
            if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
                missing += unexplained(field.annotation, f"{prefix}{name}.")
            elif not field.description:
                missing.append(prefix + name)
        return missing

    assert unexplained(Config, "") == []


def test_a_relay_alone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"node\.relay and sharing\.silo"):
        load([parse_flag("node.relay=true"), parse_flag("sharing.silo=true")], environ={})


def test_a_node_that_does_not_train_starts_no_further_ranks() -> None:
    config = load([parse_flag("training.train=false"), parse_flag("training.ranks=4")], environ={}).config
    assert config.learner_settings().training.ranks == 1


def test_the_reference_in_docs_is_current() -> None:
    assert (ROOT / "docs" / "configuration.md").read_text() == markdown(), (
        "run `swarmnode config --reference > docs/configuration.md`"
    )


def test_the_learner_gets_its_settings_and_a_seed() -> None:
    config = load(environ=TINY).config
    learner = config.learner_settings(seed=5)
    assert (learner.model.name, learner.seed) == ("tiny", 5)
    fixed = load([parse_flag("node.seed=0")], environ=TINY).config
    assert fixed.learner_settings(seed=5).seed == 0, "a configured seed wins"


def swarmnode(*arguments: str, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SWARMNODE_")}
    return subprocess.run(
        [sys.executable, "-m", "node.cli", *arguments],
        cwd=cwd,
        env={**clean, "PYTHONPATH": str(ROOT), **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_config_prints_what_is_in_force_and_masks_secrets(tmp_path: Path) -> None:
    write(tmp_path / "swarmnode.toml", '[model]\nname = "tiny"\n[verifiers.options.judge]\napi_key = "hunter2"\n')
    arguments = ("config", "--seed", "3", "--set", "training.lr=1e-5")
    text = swarmnode(*arguments, cwd=tmp_path, SWARMNODE_SHARING__LOCAL="2")
    assert text.returncode == 0, text.stderr
    lines = {line.split()[0]: line for line in text.stdout.splitlines()}
    assert lines["training.lr"].endswith("flag --set training.lr")
    assert lines["node.seed"].endswith("flag --seed")
    assert lines["sharing.local"].endswith("environment SWARMNODE_SHARING__LOCAL")
    assert lines["model.name"].endswith("file swarmnode.toml:2")
    as_json = json.loads(swarmnode(*arguments, "--json", cwd=tmp_path).stdout)
    assert as_json["training.lr"] == {"value": 1e-5, "source": "flag --set training.lr"}
    as_toml = swarmnode(*arguments, "--toml", cwd=tmp_path).stdout
    assert tomllib.loads(as_toml)["training"]["lr"] == 1e-5
    for output in (text.stdout, json.dumps(as_json), as_toml):
        assert "hunter2" not in output
        assert "*****" in output


@pytest.mark.parametrize("form", [(), ("--json",), ("--toml",)])
@pytest.mark.parametrize(
    "argument",
    [
        '"HF_TOKEN=hunter2"',
        '"-H", "Authorization: Bearer hunter2"',
        '"--api-key", "hunter2"',
        '"--password=hunter2"',
        '"sh", "-c", "SECRET=\'hunter2 hunter2\' run"',
        '"https://me:hunter2@host/path"',
        '"{\\"auth\\": \\"hunter2\\"}"',
    ],
)
def test_secrets_in_the_arguments_of_a_command_are_masked(
    form: tuple[str, ...], argument: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (
        f'[verifiers.commands.x]\nargv = ["env", {argument}]\n[verifiers.options.judge.auth]\nuser = "hunter2"\n'
        '[prompt]\nsystem = "The password: say it"\n'
    )
    loaded = load(file=write(tmp_path / "my.toml", text), environ=TINY)
    print_config(loaded, "json" if "--json" in form else "toml" if form else "text")
    printed = capsys.readouterr().out
    assert "hunter2" not in printed
    assert printed.count("********") == 2
    assert "The password: say it" in printed


def test_a_bad_setting_ends_with_status_2_and_no_traceback(tmp_path: Path) -> None:
    result = swarmnode("start", "--silo", "--model", "tiny", "--set", "training.lrr=1", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.strip() == (
        "error: training.lrr: there is no such setting; did you mean training.lr? (flag --set training.lrr)"
    )


def test_a_secret_is_not_told_in_an_error(tmp_path: Path) -> None:
    write(tmp_path / "swarmnode.toml", '[model]\nname = "tiny"\n[verifiers.options]\napi_key = "hunter2"\n')
    result = swarmnode("config", cwd=tmp_path)
    assert result.returncode == 2
    assert "hunter2" not in result.stderr
    assert "verifiers.options.api_key" in result.stderr


def test_init_writes_a_file_once(tmp_path: Path) -> None:
    assert swarmnode("init", cwd=tmp_path).returncode == 0
    file = tmp_path / "swarmnode.toml"
    written = file.read_text()
    file.write_text("# mine\n")
    refused = swarmnode("init", cwd=tmp_path)
    assert refused.returncode == 1
    assert "--force" in refused.stderr
    assert file.read_text() == "# mine\n"
    assert swarmnode("init", "--force", cwd=tmp_path).returncode == 0
    assert file.read_text() == written
    assert swarmnode("config", "--model", "tiny", cwd=tmp_path).returncode == 0


@pytest.mark.parametrize("recipe", sorted(path.name for path in RECIPES.glob("*.toml")))
def test_every_recipe_is_a_valid_configuration(recipe: str) -> None:
    settings = [key for key, _ in flatten(tomllib.loads((RECIPES / recipe).read_text()))]
    loaded = load(file=RECIPES / recipe, environ=TINY)
    assert {setting.path for setting in loaded.settings() if setting.source.kind == "file"} == set(settings)
    assert ("model", "name") not in settings, "a recipe is chosen by the model's name, so it cannot change it"


def test_a_run_goes_on_with_its_model_and_that_models_recipe(tmp_path: Path) -> None:
    DataDir(tmp_path).write_config(load_with_flags(None, None, data_dir=str(tmp_path), model="tiny").config)
    again = load_with_flags(None, None, data_dir=str(tmp_path))
    assert again.config.model.name == "tiny"
    assert again.config.lora.rank == 0
    assert "run" in {setting.source.kind for setting in again.settings() if setting.key == "model.name"}
    # What is asked for now counts more.
    assert load_with_flags(None, ["model.name=auto"], data_dir=str(tmp_path)).config.model.name == "auto"
    # With a checkpoint, `auto` is the model that it was trained from.
    (tmp_path / "checkpoints" / "00000010").mkdir(parents=True)
    auto = load_with_flags(None, ["model.name=auto"], data_dir=str(tmp_path)).config
    assert (auto.model.name, auto.lora.rank) == ("tiny", 0)
    assert load_with_flags(None, ["model.name=a/b"], data_dir=str(tmp_path)).config.model.name == "a/b"


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ('network.join=["/ip4/1.2.3.4/tcp/x"]', "is not an address"),
        ('network.join=["/ip4/192.0.2.1/tcp/4747/p2p/12D3"]', "is not a peer id"),
        ('network.listen=["/dns4/example.org/tcp/4747"]', "listens on an IP address of its own"),
        ('network.announce=["/ip4/192.0.2.1/tcp/0"]', "port 0"),
        ('network.relay=["/ip4/192.0.2.1/tcp/4747"]', "which relay"),
        ('network.allow=["nobody"]', "`swarmnode id`"),
        ("network.swarm=UP", "pattern"),
    ],
)
def test_what_is_no_address_or_peer_is_refused_where_it_stands(setting: str, problem: str) -> None:
    key = setting.partition("=")[0]
    with pytest.raises(ConfigError, match=problem) as raised:
        load([parse_flag(setting)], environ={})
    assert str(raised.value).startswith(f"{key} = ")
    assert f"(flag --set {key})" in str(raised.value)


def test_addresses_may_come_from_the_environment() -> None:
    address = "/ip4/192.0.2.1/tcp/4747"
    config = load(environ={"SWARMNODE_NETWORK__JOIN": f'["{address}"]'}).config
    assert config.network.join == [address]
    assert "listen" not in config.network.model_fields_set, "nobody chose a port"


def test_a_node_to_join_that_the_private_swarm_would_refuse_is_said() -> None:
    friend, stranger = peer_id_of(bytes(32)), peer_id_of(bytes([1] * 32))
    join = f"/ip4/192.0.2.1/tcp/4747/p2p/{stranger}"
    settings = [parse_flag(f'network.allow=["{friend}"]'), parse_flag(f'network.join=["{join}"]')]
    with pytest.raises(ConfigError, match=f"{stranger}, which is not in allow"):
        load(settings, environ={})
    load([parse_flag(f'network.allow=["{friend}", "{stranger}"]'), settings[1]], environ={})


def test_a_node_alone_has_rounds_of_its_own_size() -> None:
    sharing = load([parse_flag("sharing.silo=true"), parse_flag("sharing.alone=6")], environ=TINY).config.sharing
    assert sharing.places == (6, 0)
    assert load([parse_flag("sharing.local=3")], environ=TINY).config.sharing.places == (3, 8)
