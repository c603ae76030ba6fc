from __future__ import annotations

import math
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
from recipe_tables import Change, put, tables

from penstock import ImageDecoder
from penstock.trainer import RecipeError, TrainerConfig, TrainerConfigError, World
from penstock.trainer.__main__ import main, prepare_data
from penstock.trainer.recipes.command_line import read_command, split_overrides
from penstock.trainer.recipes.recipe import build_recipe, format_toml, shipped_recipes


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (put("trainr", {}), ["trainr", "did you mean 'trainer'"]),
        (put("trainer.step.clip_nrm", 1.0), ["trainer.step.clip_nrm=1.0", "did you mean 'clip_norm'"]),
        (put("trainer.parallel.zero", 4), ["parallel.zero=4", "0, 1, 2 or 3"]),
        (put("trainer.steps", "many"), ["trainer.steps='many'", "int"]),
        (put("trainer.steps", 0), ["steps=0", "at least 1"]),
        (put("trainer.parallel", 3), ["trainer.parallel=3", "not a table"]),
        (put("trainer.parallel", {"cpu_offload": True}), ["parallel.cpu_offload=True", "parallel.zero=1, 2 or 3"]),
        (put("trainer.parallel", {"hybrid": True}), ["parallel.hybrid=True", "parallel.zero=1, 2 or 3"]),
        (put("trainer.compile", {"cuda_graphs": True}), ["compile.cuda_graphs=True", "compile.enabled=True"]),
        (
            lambda recipe: recipe["trainer"].update(
                compile={"enabled": True, "cuda_graphs": True}, step={"accumulate": 2}
            ),
            ["compile.cuda_graphs=True", "leave step.accumulate out"],
        ),
        (put("trainer.activation", {"blocks": ["Block"]}), ["activation.blocks", "activation.every=1"]),
        (put("model.use", "penstock.trainer.recipes.digits:DigitNet"), ["model.use", "did you mean 'DigitsNet'"]),
        (put("model.use", "penstok.models:Net"), ["model.use='penstok.models:Net'", "cannot be imported"]),
        (put("model.use", "DigitsNet"), ["model.use='DigitsNet'", "package.module:name"]),
        (put("model.use", "math:pi"), ["model.use='math:pi'", "not callable"]),
        (put("model.args.widht", 3), ["model.args.widht=3", "did you mean 'width'"]),
        (put("model.width", 3), ["model.width=3", "model.args.width"]),
        (put("optimizer.args", [1]), ["optimizer.args=[1]", "not a table"]),
        (put("data", {"args": {}}), ["data.use=None", "package.module:name"]),
        (put("data.prepare", "pack"), ["data.prepare='pack'", "not a table"]),
        (put("data.prepare", {"use": "math:pi"}), ["data.prepare.use='math:pi'", "not callable"]),
        (put("data.prepare", {"use": "math:sqrt", "args": {"x": 1}}), ["data.prepare.args.target_url='train'"]),
        (put("data.args.transform", {"use": "math:sqroot"}), ["data.args.transform.use", "did you mean 'sqrt'"]),
        (put("data.args.transform", {"name": 1, "use": "math:e"}), ["data.args.transform.name=1"]),
        (
            put("data.args.decode", {"png": {"use": "penstock:ImageDecoder", "args": {"sise": 8}}}),
            ["data.args.decode.png.args.sise=8", "did you mean 'size'"],
        ),
        (put("model.meta", "yes"), ["model.meta='yes'", "true or false"]),
        (put("model.init", {"use": "math:hypot"}), ["model.init", "meta = true"]),
        (
            put("model", {"use": "torch.nn:Identity", "meta": True, "init": {"use": "math:pi"}}),
            ["model.init.use='math:pi'", "not callable"],
        ),
        (put("model.prepare", {}), ["model.prepare={}", "use and args"]),
        (put("evaluation", {"use": "math:sqrt"}), ["evaluation has no data", "[evaluation.data]"]),
    ],
)
def test_a_wrong_recipe_is_refused_with_key_value_and_cure(change: Change, words: list[str]) -> None:
    wrong = tables()
    change(wrong)
    with pytest.raises((RecipeError, TrainerConfigError)) as caught:
        build_recipe(wrong).check()
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("section", ["model", "optimizer", "loss", "data", "trainer"])
def test_a_missing_section_is_named(section: str) -> None:
    wrong = tables()
    del wrong[section]
    with pytest.raises(RecipeError, match=rf"no section \[{section}\]"):
        build_recipe(wrong)


def test_overrides_are_toml_values_or_plain_text() -> None:
    given = ["--data.b=3", "--model.c", "text", "--data.d=[1, 2]", "--trainer.steps=3", "--loss.e=true", "--data.f=x:y"]
    expected = [("data.b", 3), ("model.c", "text"), ("data.d", [1, 2]), ("loss.e", True), ("data.f", "x:y")]
    assert split_overrides(given) == (expected, ["--trainer.steps=3"])


def test_flags_of_the_trainer_are_written_as_in_toml() -> None:
    words = ["--trainer.parallel.zero", "3", "--trainer.report.quiet=true", "--trainer.step.clip_norm=none"]
    trainer = read_command(
        ["gpt", *words, "--trainer.evaluate.best=none", "--trainer.checkpoint.keep-best=0"]
    ).recipe.trainer
    assert (trainer.parallel.zero, trainer.report.quiet, trainer.step.clip_norm) == (3, True, None)
    assert (trainer.evaluate.best, trainer.steps, trainer.parallel.blocks) == (None, 300, ("Block",))


@pytest.mark.parametrize("names", ["Block,Linear", '["Block", "Linear"]'])
def test_a_list_of_names_is_written_with_commas_or_as_in_toml(names: str) -> None:
    recipe = read_command(["gpt", f"--trainer.parallel.blocks={names}"]).recipe
    assert recipe.trainer.parallel.blocks == ("Block", "Linear")


def test_flags_complete_what_the_recipe_leaves_out(tmp_path: Path) -> None:
    given = tables()
    del given["trainer"]["steps"]
    (tmp_path / "open.toml").write_text(format_toml(given))
    assert read_command([str(tmp_path / "open.toml"), "--trainer.steps=7"]).recipe.trainer.steps == 7
    with pytest.raises(TrainerConfigError, match="neither steps nor epochs"):
        read_command([str(tmp_path / "open.toml")])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["steps=3"], "steps=3"),
        (["--trainer.steps"], "--trainer.steps"),
        (["--steps=3"], "--steps=3"),
        (["--trainer.steps.more=3"], "--trainer.steps.more=3"),
        (["--trainer.step.clip_nrm=3"], "--trainer.step.clip_norm"),
        (["--trainer.steps=many"], "'many'"),
        (["--trainer.parallel.zero=4"], "'0', '1', '2', '3'"),
        (["--trainer.report.quiet=yes"], "'true', 'false'"),
        (["--trainer.parallel.cpu_offload=true"], "parallel.cpu_offload=True needs sharding"),
        ([], "RECIPE"),
    ],
)
def test_a_wrong_flag_ends_the_process_with_2_and_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as caught:
        main(["digits", *words] if words else [])
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


def test_only_the_first_rank_says_what_is_wrong_with_a_flag(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit):
        main(["digits", "--trainer.steps=many"])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--ranks=2"], "--ranks and --memory .*; add --plan"),
        (["--memory=80GiB"], "--ranks and --memory .*; add --plan"),
        (["--shards=2"], "--workers and --shards are of parallel.mode='parameter_server'"),
        (["--ray"], "--ray is for parallel.mode='parameter_server'"),
        (["--address=10.0.0.1:6379"], "--address without --ray"),
    ],
)
def test_options_without_what_they_are_for_are_refused(words: list[str], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        read_command(["digits", *words]).check()


@pytest.mark.parametrize("word", ["--model.args", "--model..width=3", "--model.args.width.more=3"])
def test_a_wrong_override_of_another_section_is_refused(word: str) -> None:
    with pytest.raises(RecipeError, match=word.partition("=")[0]):
        read_command(["digits", word])


@pytest.mark.slow
def test_the_resolved_recipe_reads_back_as_itself(tmp_path: Path) -> None:
    initialise = "--model.init.use=penstock.trainer.recipes.gpt:init_weights"
    words = ["gpt", "--trainer.step.accumulate=4", "--model.args.width=64", "--model.meta=true", initialise]
    recipe = read_command(words).recipe
    assert recipe.meta
    text = format_toml(recipe.describe())
    assert tomllib.loads(text)["trainer"]["step"]["accumulate"] == 4
    path = tmp_path / "again.toml"
    path.write_text(text)
    assert read_command([str(path)]).recipe == recipe


def test_arguments_named_by_import_path_are_what_is_named_or_what_it_returns() -> None:
    given = tables()
    put("data.args.transform", {"use": "math:sqrt"})(given)
    put("data.args.decode", {"png": {"use": "penstock:ImageDecoder", "args": {"size": 8}}, "cls": "plain"})(given)
    put("data.args.columns", ["png", {"use": "math:tau"}])(given)
    recipe = build_recipe(given)
    recipe.check()
    assert tomllib.loads(format_toml(recipe.describe()))["data"] == given["data"]
    arguments = recipe.data.resolve().keywords  # type: ignore[attr-defined]
    assert arguments["transform"] is math.sqrt
    assert arguments["decode"] == {"png": ImageDecoder(size=8), "cls": "plain"}
    assert arguments["columns"] == ["png", math.tau]


def write_rows(target_url: str, rows: int) -> str | None:
    """What a [data.prepare] may name; it counts its calls."""
    path = Path(target_url) / "rows.jsonl"
    if path.exists():
        return None
    path.parent.mkdir(parents=True)
    path.write_text('{"n": 1}\n' * rows)
    return f"{rows} rows"


@pytest.mark.slow
def test_data_is_prepared_where_the_loader_reads_it_and_once(
    tmp_path: Path, world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    given = tables()
    put("data.prepare", {"use": f"{__name__}:write_rows", "args": {"rows": 3}})(given)
    put("data.args.source", str(tmp_path / "rows"))(given)
    recipe = build_recipe(given)
    for said in ("data.prepare: 3 rows\n", ""):
        prepare_data(recipe, world)
        assert capsys.readouterr().err == said
        assert (tmp_path / "rows" / "rows.jsonl").read_text().count("n") == 3


def test_data_that_cannot_be_prepared_is_an_error_that_names_rank_and_cause(tmp_path: Path, world: World) -> None:
    given = tables()
    wrong = {"source": ["text"], "format": "tokens"}
    put("data.prepare", {"use": "penstock.loader:pack_once", "args": wrong})(given)
    put("data.args.source", str(tmp_path / "rows"))(given)
    problem = "data.prepare failed on rank 0: ConfigError: format='tokens' needs a sequence length"
    with pytest.raises(RecipeError, match=problem):
        prepare_data(build_recipe(given), world)


@pytest.mark.parametrize("name", shipped_recipes())
def test_a_shipped_recipe_names_only_what_there_is(name: str) -> None:
    read_command([name]).recipe.check()


def options_of(config: Any, prefix: str) -> list[tuple[str, Any]]:
    """(dotted key, value) of every option of a config."""
    found: list[tuple[str, Any]] = []
    for entry in fields(config):
        value = getattr(config, entry.name)
        key = f"{prefix}{entry.name}"
        found += options_of(value, f"{key}.") if is_dataclass(value) else [(key, value)]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("columns", [80, 120])
def test_help_lists_every_option_with_the_recipes_value_and_its_meaning(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit) as caught:
        main(["gpt", "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= columns
    options = options_of(read_command(["gpt"]).recipe.trainer, "trainer.")
    assert len(options) > len(fields(TrainerConfig))
    plain = " ".join(text.replace("│", " ").split())
    for key, value in options:
        shown = (",".join(value) if isinstance(value, tuple) else str(value)) or "none"
        shown = shown.lower() if value is None or isinstance(value, bool) else shown
        said = re.search(rf"--{key} \S+ ([^(].+?) \(default: {re.escape(shlex.quote(shown))}\)", plain)
        assert said, key
        assert "--trainer" not in said[1], key


def test_a_recipe_that_is_not_there_names_those_that_ship(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["digit"]) == 2
    assert "did you mean 'digits'" in capsys.readouterr().err


def test_a_file_that_is_no_toml_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "broken.toml"
    path.write_text("[model")
    assert main([str(path)]) == 2
    assert "is not TOML" in capsys.readouterr().err


def test_the_dry_run_prints_the_recipe_and_trains_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["digits", "--dry-run", "--trainer.steps=7"]) == 0
    assert tomllib.loads(capsys.readouterr().out)["trainer"]["steps"] == 7
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("arguments", ["digits --help", "digits --dry-run"])
@pytest.mark.parametrize("output", ["| true; exit ${PIPESTATUS[0]}", ">&-"])
def test_help_that_nobody_reads_to_its_end_ends_without_a_traceback(arguments: str, output: str) -> None:
    command = f"{sys.executable} -m penstock.trainer {arguments} {output}"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
