"""`python -m kvbench`: what it prints, what it refuses, how it exits. `kvbench.runs.sweep` is a stand-in."""

import errno
import io
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from kvbench import config
from kvbench.cli import checks, compose, launchers, sweep
from kvbench.cli import main as cli
from kvbench.cli.checks import leaves
from kvbench.cli.commands import other_command

ROOT = Path(__file__).resolve().parent.parent
# Imported by every Python that finds it on its path: the run that the command line hands over to.
STAND_IN = """
import sys, types
module = types.ModuleType("kvbench.runs.sweep")
exec({source!r}, module.__dict__)
sys.modules["kvbench.runs.sweep"] = module
"""

# At exit, a line that says which of the slow imports happened.
HEAVY = """
import atexit, sys
atexit.register(lambda: print("heavy:", *sorted({"torch", "transformers", "numpy"} & set(sys.modules))))
"""


@pytest.fixture
def python(tmp_path):
    """Run `python -m kvbench` for real, in an empty folder, with a `kvbench.runs.sweep` of this source."""

    def run(*words, source="def run(cfg): pass", extra=""):
        site = tmp_path / "site"
        site.mkdir(exist_ok=True)
        (site / "sitecustomize.py").write_text(STAND_IN.format(source=source) + extra)
        home = tmp_path / "here"
        home.mkdir(exist_ok=True)
        env = os.environ | {"PYTHONPATH": f"{site}{os.pathsep}{ROOT}"}
        command = [sys.executable, "-m", "kvbench", *words]
        return subprocess.run(command, cwd=home, env=env, capture_output=True, text=True, timeout=60)

    return run


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """The same within this process: (exit code, stderr, configs that were run)."""
    monkeypatch.chdir(tmp_path)
    ran = []
    stand_in = ModuleType("kvbench.runs.sweep")
    stand_in.run = lambda cfg, shard=None: ran.append(cfg)

    def run_arms(configs, shard=None):
        outcomes = []
        for cfg in configs:
            try:
                outcomes.append(SimpleNamespace(summary=stand_in.run(cfg), error=None))
            except Exception as error:
                outcomes.append(SimpleNamespace(summary=None, error=error))
        return outcomes

    monkeypatch.setitem(sys.modules, "kvbench.runs.sweep", stand_in)
    stand_in.run_arms = run_arms

    def run(*words, does=None):
        if does is not None:
            stand_in.run = lambda cfg, shard=None: does(cfg)
        return cli.main(words), capsys.readouterr().err, ran

    return run


@pytest.fixture
def refusal(command, tmp_path):
    """The one line on stderr of a command that must be refused with exit code 2, before anything ran or was written."""

    def run(*words):
        code, err, ran = command(*words)
        assert (code, ran, list(tmp_path.iterdir())) == (2, [], [])
        assert err.startswith("kvbench: ") and err.count("\n") == 1
        return err[len("kvbench: ") : -1]

    return run


# -- help -------------------------------------------------------------------------------------------------------------


def test_help_imports_nothing_heavy(python):
    done = python("--help", extra=HEAVY)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "heavy:"


def test_help_names_every_choice_with_its_line_and_every_key_with_its_default(command, capsys):
    lines = [" ".join(line.split()) for line in cli.help_text().splitlines()]
    for group in config.groups():
        for name, about in config.choices(group).items():
            assert f"{group}={name} {about}" in lines
    for name, about in config.choices("experiment").items():
        assert about and f"+experiment={name} {about}" in lines
    keys = {key for key, _ in leaves(config.root_keys())}
    assert {"protocol.question", "protocol.generated", "probe.every"} < keys
    assert {key for key, _, _ in config.documented_keys()} == keys
    assert "budget=256 tokens (256), a fraction" in "\n".join(lines)


@pytest.mark.parametrize("word", ["-h", "--help"])
def test_help_wins_over_whatever_stands_beside_it(command, word):
    assert command("budget=0", word)[0] == 0


# -- bad input --------------------------------------------------------------------------------------------------------


def test_bad_input_is_one_line_with_exit_code_2_and_nothing_heavy(python, tmp_path):
    done = python("budget=0", extra=HEAVY)
    assert (done.returncode, done.stdout) == (2, "heavy:\n")
    assert done.stderr.startswith("kvbench: budget=0: out of range; expected") and done.stderr.count("\n") == 1
    assert list((tmp_path / "here").iterdir()) == []


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["method=qest"], "method=qest: no such method; did you mean quest? (kvbench --help lists all "),
        (
            ["model=llama"],
            "model=llama: no such model; did you mean llama3.1-8b-instruct or ",
        ),
        (["method=null"], "method=null: no such method; "),
        (["method="], "method=: no such method; (valid: "),
        (["=5"], "=5: no key; expected key=value"),
        (["experiment=fidelity"], "experiment=fidelity: is put on top of the others; write +experiment=fidelity"),
        (["-m", "budget=range(1,0)"], "budget=range(1,0): no value in it"),
        (
            ["-m", "hydra/launcher=slurm", "hydra.launcher.tim=3"],
            "hydra.launcher.tim=3: no such key; did you mean time",
        ),
        (["--cfg", "method=full"], "argument --cfg/-c: invalid choice: 'method=full'"),
        (["sweep.shards=4"], "sweep.shards=4: shares samples out over jobs, and needs -m"),
        (["-m", "sweep.shards=0"], "sweep.shards=0: expected a whole number, 1 or more"),
        (["task=pass"], "task=pass: no such task; did you mean passkey? "),
        (["-m", "method=full,qest"], "method=qest: no such method; did you mean quest?"),
        (["hydra/launcher=slrm"], "hydra/launcher=slrm: no such hydra/launcher; "),
        (["budgt=64"], "budgt=64: no such key; did you mean budget? "),
        (["engine=vllm"], "engine=vllm: no such key; did you mean backend?"),
        (["methd=quest"], "methd=quest: no such key; did you mean method? "),
        (["page_size=32"], "page_size=32: no such key; did you mean method.page_size?"),
        (["method.page_sise=32"], "method.page_sise=32: no such key; did you mean page_size or small_page_size? "),
        (["protocol.acounting=paper"], "protocol.acounting=paper: no such key; did you mean accounting? "),
        (["+budgt=64"], "budgt=64: no such key; did you mean budget? "),
        (["~budgt"], "~budgt: no such key; did you mean budget? "),
        (["budget"], "budget: no value; expected key=value, such as budget=256"),
        (["budget=[1"], "budget=[1: cannot be read; expected key=value"),
        (["budget=64,128"], "budget=64,128: several values are a sweep and need -m"),
        (["task.lengths=1,2"], "task.lengths=1,2: several values are a sweep and need -m; a list is written task.len"),
        (["--budget", "64"], "--budget: no such flag; settings are written key=value, as in budget=64 (see --help)"),
        (["-m", "--cfg", "job"], "--cfg: shows one run; "),
        (["--config-dir", "nowhere"], "--config-dir=nowhere: no such folder"),
        (["--config-name", "nowhere"], "--config-name=nowhere: "),
        (["+method=topk"], "Multiple values for method."),
        (["-m", "budget=interval(1,9)"], "budget=interval(1,9): "),
    ],
)
def test_unknown_names_keys_and_flags_are_refused_with_the_nearest(refusal, words, line):
    assert refusal(*words).startswith(line)


@pytest.mark.parametrize(
    ("words", "right"),
    [
        (["quest"], "method=quest"),
        (["-m", "full,quest"], "method=full,quest with -m"),
        (["niah", "method=quest"], "task=niah"),
        (["int8"], "kv=int8"),
        (["icecache_fig6"], "+experiment=icecache_fig6"),
        (["quset"], "method=quest?"),
        (["method:quest"], "method=quest"),
        (["method==quest"], "method=quest"),
        (["method=", "quest"], "method=quest"),
        (["budget=64,", "128"], "without spaces"),
        (["budget", "=", "64"], "budget=256"),
        (["method=quest,"], "comma"),
        (["method=,quest"], "comma"),
        (["a=b=c"], "a='b=c'"),
        (["--method", "quest"], "method=quest"),
        (["--method=quest"], "method=quest"),
        (["-method", "quest"], "method=quest"),
        (["--task.limit", "3"], "task.limit=3"),
    ],
)
def test_a_word_that_is_no_setting_is_answered_with_how_it_is_written(refusal, words, right):
    said = refusal(*words)
    assert right in said and not any(jargon in said for jargon in ("EQUAL", "EOF", "Lexer", "input"))


def test_every_method_and_task_alone_is_no_command_and_its_key_is_named(capsys):
    assert [name for group in ("method", "task") for name in config.choices(group) if other_command([name])] == []
    assert cli.main(["scope"]) == 2 and "method=scope" in capsys.readouterr().err  # which is nearly `score`


@pytest.mark.parametrize(
    ("words", "right"),
    [
        (["method=[full,snapkv]"], "method=full,snapkv with -m"),
        (["-m", "method=[full,snapkv]"], "method=full,snapkv with -m"),
        (["-m", "method=[full,snapkv],quest"], "method=full,snapkv with -m"),
        (["task=[passkey, niah]"], "task=passkey,niah with -m"),
        (["model=[tiny]"], "model=tiny with -m"),
        (["kv=[native,int8]"], "kv=native,int8 with -m"),
        (["budget=[64,128]"], "budget=64,128 with -m"),
        (["-m", "budget=[64,128]"], "budget=64,128 with -m"),
        (["seed=[0,1]"], "seed=0,1 with -m"),
        (["probe.every=[1,2]"], "probe.every=1,2 with -m"),
    ],
)
def test_a_list_where_one_value_is_expected_is_no_sweep(refusal, words, right):
    assert right in refusal(*words)


def test_a_list_of_choices_in_an_experiment_is_no_sweep_either(command, tmp_path):
    (tmp_path / "experiment").mkdir()
    text = "# @package _global_\nhydra:\n  mode: MULTIRUN\n  sweeper:\n    params: {method: '[full,quest]'}\n"
    (tmp_path / "experiment" / "both.yaml").write_text(text)
    code, err, ran = command("--config-dir", str(tmp_path), "+experiment=both")
    assert (code, ran) == (2, []) and "method=full,quest with -m" in err


@pytest.mark.parametrize(
    "words",
    [
        ["method=full", "method=snapkv"],
        ["budget=64", "-m", "budget=128"],
        ["-m", "budget=64,128", "budget=128,256"],
        ["task.limit=1", "++task.limit=2"],
        ["results_dir=a", "results_dir=b"],
        ["+experiment=icecache_fig6", "+experiment=reference_tiny"],
    ],
)
def test_one_key_with_two_values_is_refused_and_both_are_named(refusal, words):
    said = refusal(*words)
    values = [word.partition("=")[2] for word in words if "=" in word]
    assert all(f"={value}" in said for value in values) and f"={','.join(values)} with -m" in said


def test_one_key_twice_with_one_value_and_a_value_over_an_experiments_are_what_they_say(command, tmp_path):
    code, err, (cfg,) = command("budget=64", "method=quest", "budget=64")
    assert (code, err, cfg.budget) == (0, "", 64)
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\nbudget: 128\nseed: 3\n")
    code, err, (_, cfg) = command("--config-dir", str(tmp_path), "+experiment=mine", "budget=64")
    assert (code, err, cfg.budget, cfg.seed) == (0, "", 64, 3)


def test_a_value_twice_in_a_sweep_is_one_arm(command):
    code, _, ran = command("-m", "method=quest,quest", "budget=64,64")
    assert (code, len(ran)) == (0, 1)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("name: [\n", "mine.yaml: no YAML: while parsing a flow node "),
        ("name: mine\n", "method._target_: missing; every run needs it"),
        ("name: mine\n_target_: no_such.Mine\n", "method._target_=no_such.Mine: no module no_such; expected one that "),
        ("name: mine\n_target_: json.Mine\nminimum: 3\n", "method.minimum=3: expected tokens by accounting, such as {"),
    ],
)
def test_a_file_of_ones_own_that_is_none_is_refused(command, tmp_path, text, line):
    (tmp_path / "method").mkdir()
    (tmp_path / "method" / "mine.yaml").write_text(text)
    code, err, ran = command("--config-dir", str(tmp_path), "method=mine")
    assert (code, ran, err.count("\n")) == (2, [], 1) and line in err


def test_every_value_of_a_sweep_is_checked_before_the_first_job(refusal):
    assert refusal("-m", "budget=64,32").startswith("budget=32: below the minimum of icecache")
    assert refusal("-m", "method=full,quest", "budget=40,64").startswith("budget=40: below the minimum of quest")
    assert refusal("-m", "method=full,topk", "+method.depth=1,2").startswith("method.depth=1: no such key")


def test_each_run_is_composed_and_checked_once(command, monkeypatch):
    """But for a sweep itself, which is composed to know its arms and its launcher."""
    made, checked = [], []
    check, load = checks.check, type(compose.loader_of()).load_configuration
    monkeypatch.setattr(sweep, "check", lambda cfg, here: (checked.append(here), check(cfg, here))[1])
    monkeypatch.setattr(checks, "check", lambda cfg: (checked.append(True), check(cfg))[1])
    monkeypatch.setattr(launchers, "check_run", lambda config: checked.append("again"))
    monkeypatch.setattr(
        type(compose.loader_of()), "load_configuration", lambda *a, **more: (made.append(a[2]), load(*a, **more))[1]
    )
    assert command("budget=64")[0] == 0
    assert (made, checked) == ([["budget=64"]], [True])
    made.clear(), checked.clear()
    assert command("-m", "method=quest,topk", "budget=64,128")[0] == 0
    runs = [[f"method={method}", f"budget={budget}"] for method in ("quest", "topk") for budget in (64, 128)]
    assert sorted(made) == sorted([runs[0], *runs]) and checked == [True] * 4


def test_a_mistyped_choice_of_a_large_sweep_is_met_before_its_runs_are_composed(refusal, monkeypatch):
    monkeypatch.setattr(compose.RunRequest, "arm_config", lambda *_: pytest.fail("composed"))
    assert refusal("-m", "seed=range(1000)", "method=topk,qest").startswith("method=qest: no such method")


def test_jobs_that_a_launcher_sends_elsewhere_are_held_against_the_machine_that_they_run_on(
    command, tmp_path, monkeypatch
):
    (tmp_path / "hydra" / "launcher").mkdir(parents=True)
    (tmp_path / "hydra" / "launcher" / "far.yaml").write_text("_target_: far_away.Launcher\nnear: false\n")
    (tmp_path / "far_away.py").write_text(
        "from kvbench.cli.launchers import InTurn\n"
        "class Launcher(InTurn):\n"
        "    def __init__(self, near):\n        self.here = near\n"
    )
    at_start, at_its_turn = [], []
    check = checks.check
    monkeypatch.setattr(sweep, "check", lambda cfg, here: (at_start.append(here), check(cfg, here))[1])
    monkeypatch.setattr(launchers, "check_run", lambda config: at_its_turn.append(config.budget))
    words = ["--config-dir", str(tmp_path), "hydra/launcher=far", "budget=64,128"]
    assert command(*words)[0] == 0
    assert (at_start, at_its_turn) == ([False, False], [64, 128])
    assert command(*words, "hydra.launcher.near=true")[0] == 0
    assert (at_start[2:], at_its_turn[2:]) == ([True, True], [])


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["hydra.job.chdir=true"], "hydra.job.chdir=true"),
        (["hydra.output_subdir=.hydra"], "hydra.output_subdir=.hydra"),
        (["hydra/job_logging=default"], "hydra/job_logging=default"),
        (["hydra/launcher=basic"], "hydra/launcher=basic"),
        (["-m", "hydra/sweeper=basic"], "hydra/sweeper=basic"),
        (["hydra/launcher=local,in_turn"], "hydra/launcher=local,in_turn"),
        (["hydra/launcher=[local,in_turn]"], "hydra/launcher=[local,in_turn]"),
        (["hydra/launcher=local", "hydra.launcher.jobs=1,2"], "hydra.launcher.jobs=1,2"),
        (["hydra/launcher=local", "hydra.launcher.jobs=0"], "hydra.launcher.jobs=0"),
        (["-m", "hydra.sweeper.max_batch_size=2"], "hydra.sweeper.max_batch_size=2"),
        (["--info"], "--info"),
        (["--package", "nowhere", "--cfg", "job"], "--package=nowhere"),
    ],
)
def test_what_hydra_has_and_kvbench_has_not_is_refused_by_name(refusal, words, key):
    assert refusal(*words).startswith(f"{key}: ")


# -- running ----------------------------------------------------------------------------------------------------------


def test_a_bare_command_runs_the_defaults(command):
    code, err, (cfg,) = command()
    assert (code, err) == (0, "")
    assert (cfg.model.name, cfg.method.name, cfg.task.name, cfg.budget) == ("tiny", "icecache", "passkey", 256)
    assert "hydra" not in cfg.resolved


def test_a_sweep_runs_every_combination_and_flags_may_stand_anywhere(command):
    code, _, ran = command("method=full,quest", "-m", "budget=64,0.5,null")
    assert code == 0
    each = [("quest", budget) for budget in (64, 0.5, None)]
    assert [(cfg.method.name, cfg.budget) for cfg in ran] == [("full", 64), *each], (
        "full attention once for all budgets"
    )


def test_a_run_with_a_launcher_is_a_sweep_of_one_arm(command, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert command("hydra/launcher=slurm")[:2] == (
        2,
        "kvbench: hydra/launcher=slurm: there is no sbatch here; start it where jobs can be submitted\n",
    )
    assert command("--cfg", "job", "hydra/launcher=slurm")[:2] == (0, "")


def test_nothing_is_left_beside_what_a_run_writes(command, tmp_path):
    command("results_dir=out")
    command("results_dir=out", "-m", "budget=64,128")
    assert list(tmp_path.iterdir()) == []


def test_cfg_job_prints_the_config_and_runs_nothing(python, tmp_path):
    done = python("--cfg", "job", "method=snapkv", source="def run(cfg): raise SystemExit('ran')")
    assert (done.returncode, done.stderr) == (0, "")
    assert "_target_: methods.snapkv.SnapKV" in done.stdout and "window: 32" in done.stdout
    assert list((tmp_path / "here").iterdir()) == []


@pytest.mark.slow
def test_an_experiment_may_bring_its_own_sweep(command, tmp_path, monkeypatch):
    conf = tmp_path / "mine"
    (conf / "experiment").mkdir(parents=True)
    text = "# @package _global_\nhydra:\n  sweeper:\n    params:\n      method: full,quest\n      budget: 32,64\n"
    (conf / "experiment" / "both.yaml").write_text(text)
    words = ["-m", "--config-dir", str(conf), "+experiment=both"]
    code, err, ran = command(*words)
    assert (code, ran) == (2, []) and "budget=32: below the minimum of quest" in err
    code, _, ran = command(*words, "budget=64,128")
    assert [(cfg.method.name, cfg.budget) for cfg in ran] == [
        ("full", 64), ("quest", 64), ("quest", 128)
    ]  # fmt: skip


@pytest.mark.slow
def test_an_experiment_may_name_arms_each_with_keys_of_its_own(command, tmp_path):
    conf = tmp_path / "mine"
    (conf / "experiment").mkdir(parents=True)
    text = """\
# @package _global_
hydra:
  mode: MULTIRUN
  sweeper:
    params: {seed: "0,1", budget: 64}
    arms:
      - {method: full, budget: null}
      - {method: "topk,quest"}
      - {method: icecache, budget: "64,128"}
"""
    (conf / "experiment" / "rows.yaml").write_text(text)

    def ran(*words):
        code, _, configs = command("--config-dir", str(conf), "+experiment=rows", *words)
        assert code == 0
        made = [(cfg.method.name, cfg.budget, cfg.seed) for cfg in configs]
        configs.clear()
        return made

    rows = [("full", None), ("topk", 64), ("quest", 64), ("icecache", 64), ("icecache", 128)]
    assert sorted(ran(), key=str) == sorted([(*row, seed) for row in rows for seed in (0, 1)], key=str)
    assert sorted(ran("seed=2", "budget=256")) == sorted((row[0], 256, 2) for row in rows[:-1]), "256 twice is one run"
    assert ran("method=quest,topk", "budget=48", "seed=0") == [("quest", 48, 0), ("topk", 48, 0)]
    code, err, configs = command("--config-dir", str(conf), "+experiment=rows", "budget=32")
    assert (code, configs) == (2, []) and "budget=32: below the minimum of quest" in err


@pytest.mark.slow
def test_cfg_job_of_an_experiment_shows_its_sweep_above_the_config(python):
    done = python("--cfg", "job", "+experiment=icecache_table2", "budget=64")
    lines = done.stdout.splitlines()
    assert lines[1:4] == ["#   method=full budget=64", "#   method=icecache budget=64", "budget: 64"]
    assert "#" not in python("--cfg", "job", "method=full").stdout.splitlines()[0]


# -- failures ---------------------------------------------------------------------------------------------------------


def test_bad_input_found_by_the_run_is_one_line_with_exit_code_2(command):
    def refuse(cfg):
        raise config.ConfigError("model.path=x: not there")

    assert command(does=refuse)[:2] == (2, "kvbench: model.path=x: not there\n")


def test_a_refused_job_of_a_sweep_does_not_stop_the_others(command):
    ran = []

    def refuse_first(cfg):
        ran.append(cfg.budget)
        if cfg.budget == 64:
            raise config.ConfigError("budget=64: no")

    for words in ((), ("sweep.shared_prefill=false",)):
        ran.clear()
        code, err, _ = command("-m", "budget=64,128", *words, does=refuse_first)
        assert (code, ran) == (1, [64, 128])
        assert err.splitlines() == [
            "kvbench: budget=64: budget=64: no",
            "kvbench: 1 of 2 arms did not finish; the same command goes on with them",
        ]


def test_a_run_none_of_whose_samples_ran_exits_with_1_and_one_that_had_some_with_0(command):
    line = "kvbench: all 3 samples failed; the same command tries them again\n"
    assert command(does=lambda cfg: {"n": 3, "failed": 3})[:2] == (1, line)
    assert command(does=lambda cfg: {"n": 3, "failed": 2})[:2] == (0, "")


def test_a_sweep_with_an_arm_none_of_whose_samples_ran_exits_with_1_and_names_it(command):
    code, err, _ = command("-m", "budget=64,128", does=lambda cfg: {"n": 3, "failed": 3 if cfg.budget == 64 else 0})
    assert code == 1
    assert err.splitlines() == [
        "kvbench: budget=64: all 3 samples failed",
        "kvbench: 1 of 2 arms have no sample that ran; the same command tries them again",
    ]


def test_other_failures_exit_with_1_and_their_traceback(python):
    done = python(source="def run(cfg): raise RuntimeError('broken')")
    assert done.returncode == 1
    assert "Traceback" in done.stderr and done.stderr.splitlines()[-1] == "RuntimeError: broken"


def test_a_full_disk_under_results_dir_is_refused_before_anything_runs(refusal, monkeypatch):
    monkeypatch.setattr(checks.tempfile, "TemporaryFile", lambda dir: io.FileIO("/dev/full", "w"))
    said = refusal("results_dir=out")
    assert said.startswith("results_dir=out: ") and "No space left" in said


def test_an_error_of_a_files_within_a_run_is_no_full_disk(command):
    def fail(cfg):
        raise FileNotFoundError(errno.ENOENT, "no such file", "data")

    with pytest.raises(FileNotFoundError):
        command(does=fail)


def test_ctrl_c_exits_with_130_and_no_traceback(python):
    done = python(source="def run(cfg): raise KeyboardInterrupt")
    assert (done.returncode, done.stderr) == (130, "kvbench: stopped; the same command goes on from here\n")


# -- a user's own files -----------------------------------------------------------------------------------------------


def test_a_folder_with_methods_py_and_conf_of_its_own_changes_nothing(python, tmp_path):
    here = tmp_path / "here"
    (here / "conf" / "method").mkdir(parents=True)
    (here / "conf" / "method" / "icecache.yaml").write_text("name: theirs\n")
    (here / "methods.py").write_text("raise SystemExit('the wrong methods')\n")
    done = python(source="def run(cfg):\n import methods\n print(cfg.method.name, methods.__file__)")
    assert done.stdout.splitlines()[1].split() == ["icecache", str(ROOT / "methods" / "__init__.py")]
    assert done.returncode == 0


@pytest.mark.slow
def test_a_method_of_ones_own_runs_from_the_current_folder(python, tmp_path):
    here = tmp_path / "here"
    (here / "conf" / "method").mkdir(parents=True)
    (here / "conf" / "method" / "mine.yaml").write_text("name: mine\n_target_: my_methods.Mine\ndepth: 3\n")
    (here / "my_methods.py").write_text("class Mine:\n def __init__(self, depth): self.depth = depth\n")
    source = "def run(cfg):\n print(cfg.method.build().depth)"
    done = python("--config-dir", "conf", "method=mine", "method.depth=5", source=source)
    assert (done.returncode, done.stdout.splitlines()[1:], done.stderr) == (0, ["5"], "")
    own = ["method=full", "method.name=mine", "method._target_=my_methods.Mine", "+method.depth=7"]
    done = python(*own, source=source)
    assert (done.returncode, done.stdout.splitlines()[1:]) == (0, ["7"])


def test_another_methods_module_that_is_already_there_is_named(monkeypatch):
    theirs = ModuleType("methods")
    theirs.__file__ = "/home/me/methods.py"
    monkeypatch.setitem(sys.modules, "methods", theirs)
    with pytest.raises(config.ConfigError, match=r"methods=/home/me/methods.py: already imported"):
        config.bind_methods()


def test_a_wheels_own_conf_comes_before_the_checkouts(monkeypatch, tmp_path):
    assert config.conf_dir() == ROOT / "conf"
    monkeypatch.setattr(config, "PACKAGE", tmp_path / "kvbench")
    (tmp_path / "kvbench" / "conf").mkdir(parents=True)
    assert config.conf_dir() == tmp_path / "kvbench" / "conf"


def test_version_is_kvbenchs_own(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == "kvbench 0.1.0\n"


# -- the other commands -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        ["calibrate", "model=tiny", "model=dummy-tiny"],
        ["demo", "model=tiny", "model=dummy-tiny"],
        ["score", ".", "task.lengths=1", "task.lengths=2"],
    ],
)
def test_one_key_with_two_values_is_refused_by_every_command(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(words) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and all(word in err for word in words[-2:])


def test_a_calibration_takes_no_list_of_models(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["calibrate", "model=[tiny,dummy-tiny]"]) == 2
    assert "model=[tiny,dummy-tiny]: expected one model" in capsys.readouterr().err
