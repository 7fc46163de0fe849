"""The command line itself: its list of subcommands, its mistakes, its help, and how the workflow calls it."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import gripmoe
from commands import SUMMARIES, wrong_with
from gripmoe.cli import configure as commands
from gripmoe.cli.main import COMMANDS, load, main
from gripmoe.config.project import Project

CONFIG = Path(__file__).parents[2] / "workflow" / "config"
RULES = sorted(CONFIG.parent.joinpath("rules").glob("*.smk"))


def test_mistakes_are_one_line_and_exit_2(tmp_path, capsys):
    assert main(["configure", "--settings", "{not json", "--output", str(tmp_path / "run.yaml")]) == 2
    message = capsys.readouterr().err
    assert message.startswith("gripmoe configure: error: --settings: not valid JSON") and message.count("\n") == 1
    settings = json.dumps({"source": "embedded", "world_sed": 1})
    assert main(["prepare-data", "--settings", settings, "--output", str(tmp_path)]) == 2
    assert "world_sed: unknown key" in capsys.readouterr().err


@pytest.mark.parametrize("bug", [ValueError, FileNotFoundError])
def test_a_bug_is_a_traceback(bug, tmp_path, monkeypatch):
    """And no mistake of the user's."""

    def broken(*_):
        raise bug("a bug")

    monkeypatch.setattr(commands, "write_yaml", broken)
    run = Project(CONFIG, "tiny").run("tiny_a", "wmdp_tiny", "gd", "anchored", 0)
    with pytest.raises(bug, match="a bug"):
        main(["configure", "--settings", run.model_dump_json(), "--output", str(tmp_path / "run.yaml")])


READ = {  # what commands ask for; {gone} is missing
    "--retain-corpus": "trace-routing --settings=null --model={there} --retain-corpus={gone} --forget-corpus={there}"
    " --digest={new} --forget-output={new} --output={new}",
    "--bases": "unlearn --run={there} --model={there} --data={folder} --trace={there} --forget-trace={there}"
    " --bases={gone} --original-answers={new} --output={new}",
    "--checkpoint": "attack --settings=null --run={there} --benchmark=null --model={there} --checkpoint={gone}"
    " --data={folder} --questions={new} --output={new}",
    "--questions": "rewrite --model=a --questions={gone} --output={new}",
    "folders": "collect {folder} {gone} --histories={new} --answers={new} --attacks={new} --output={new}",
    "--manifest": "verify --manifest={gone}",
}


@pytest.mark.parametrize("flag", READ)
def test_a_missing_file_is_named_with_its_flag_before_anything_runs(flag, tmp_path, capsys):
    """Also where another command writes what has this name."""
    there, gone, new = tmp_path / "there", tmp_path / "gone", tmp_path / "new"
    there.touch()
    assert main(READ[flag].format(there=there, gone=gone, new=new, folder=tmp_path).split()) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert flag in line and str(gone) in line


@pytest.mark.parametrize("command", [["status"], ["why", "tiny_a"]])
@pytest.mark.parametrize("world", ["tinny", ""])
def test_an_unknown_world_is_one_line(command, world, monkeypatch, capsys):
    monkeypatch.chdir(CONFIG.parents[1])
    assert main([*command, "--world", world]) == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"gripmoe {command[0]}: error: world {world!r}: no world workflow/config/{world}.yaml; ")
    assert said.err.count("\n") == 1 and not said.out


def test_code_beside_the_snakefile_is_found(tmp_path, monkeypatch, capsys):
    shutil.copytree(CONFIG, tmp_path / "workflow" / "config")
    row = 'mine: {constraint: "beside_the_snakefile:Near"}'
    (tmp_path / "workflow" / "config" / "methods.yaml").write_text(row, encoding="utf-8")
    (tmp_path / "beside_the_snakefile.py").write_text("class Near: ...", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    assert main(["status", "--world", "tiny"]) == 0, capsys.readouterr().err


def test_the_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"gripmoe {gripmoe.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "gripmoe: error: Missing command."),
        (["unlern"], "gripmoe: error: No such command 'unlern'. Did you mean 'unlearn'?"),
        (["status", "--wrld", "tiny"], "gripmoe status: error: No such option: --wrld (Possible options: --world)"),
        (
            ["plan", "--jobs", "many"],
            "gripmoe plan: error: Invalid value for '--jobs': Input should be",
        ),
    ],
)
def test_a_mistake_in_flags_is_one_line(arguments, said, capsys):
    assert main(arguments) == 2
    told = capsys.readouterr()
    assert told.err.startswith(said) and told.err.count("\n") == 1 and not told.out


def test_an_interruption_by_hand_is_no_traceback(tmp_path, monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "parse_settings", interrupted)
    assert main(["configure", "--settings", "{}", "--output", str(tmp_path / "run.yaml")]) == 130
    assert capsys.readouterr().err == "gripmoe configure: interrupted\n"


def test_help_lists_the_commands_by_panel():
    shown = subprocess.run([sys.executable, "-m", "gripmoe.cli.main", "--help"], capture_output=True, text=True).stdout
    for panel, listed in COMMANDS.items():
        part = shown.partition(f"{panel}:\n")[2].partition("\n\n")[0]
        assert re.findall(r"^  (\S+)", part, flags=re.MULTILINE) == list(listed)


@pytest.mark.parametrize("name", SUMMARIES)
def test_a_command_is_a_function_that_explains_itself(name):
    """Its summary is that of the list, every flag has a help, and its example can be pasted."""
    command = load(name)
    assert command.help.splitlines()[0] == SUMMARIES[name]
    assert all(parameter.help for parameter in command.params)
    example = command.help.partition("Example:")[2].partition("\f")[0].replace("\\\n", "")
    assert example.count("gripmoe") == 1 and not wrong_with(example)
    for flag, value in zip(shlex.split(example), shlex.split(example)[1:], strict=False):
        assert flag not in ("--settings", "--benchmark") or json.loads(value)


def test_commands_and_modules_are_the_same():
    modules = {file.stem.replace("_", "-") for file in Path(commands.__file__).parent.glob("[a-z]*.py")}
    assert modules - set(SUMMARIES) == {"common", "fork-server", "main", "options"} and set(SUMMARIES) < modules


def shell_lines(rules: str) -> list[str]:
    """The commands of this package in a rule file, with what functions of its parameters add."""
    texts = re.findall(r"shell:\n((?:\s+\".*\"\n?)+)", rules.replace('f"{GRIPMOE} ', '"gripmoe '))
    lines = ["".join(re.findall(r'"(.*)"', text)) for text in texts]
    return [re.split(r" > | 2>&1", line)[0] for line in lines if line.startswith("gripmoe ")]


@pytest.mark.parametrize("file", RULES, ids=lambda file: file.stem)
def test_rules_call_commands_and_flags_that_exist(file):
    rules = file.read_text()
    lines = shell_lines(rules)
    assert len(lines) == len(re.findall(r'"(?:gripmoe|{GRIPMOE}) [a-z]', rules))
    assert not [wrong for line in lines for wrong in wrong_with(line)]


def test_all_steps_of_the_workflow_are_called_by_rules():
    """The controls: another command, another flag and a missing flag are seen."""
    called = {line.split()[1] for file in RULES for line in shell_lines(file.read_text())}
    assert called == {*COMMANDS["Steps of the workflow"], "plan"}
    assert wrong_with("gripmoe unlern --run x") == ["unlern"]
    assert wrong_with("gripmoe configure --setings x --output y") == ["--setings", "--settings"]


@pytest.mark.parametrize("kind", ["letters", "news"])
def test_prepared_data_is_the_same_every_time(kind, tmp_path):
    settings = json.dumps({"source": "embedded", "kind": kind, "world_seed": 0})
    contents = []
    for name in ("a", "b"):
        assert main(["prepare-data", "--settings", settings, "--output", str(tmp_path / name)]) == 0
        contents.append({path.name: path.read_bytes() for path in (tmp_path / name).glob("*.jsonl")})
    assert contents[0] == contents[1] and len(contents[0]) == {"letters": 7, "news": 6}[kind]
