from __future__ import annotations

import os
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose import toml
from rose.config import PROBLEMS_SHOWN, Job, load_job
from rose.errors import ConfigError
from rose.toml import FILE_BYTES_MAX


def refused(path: Path) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_job(path)
    assert str(path) in caught.value.what
    return caught.value


def with_lines(path: Path, text: str) -> Path:
    path.write_text(path.read_text() + text)
    return path


def test_the_smallest_job_has_every_default(job: Job) -> None:
    assert (job.rollout.groups, job.rollout.group_size, job.train.learning_rate) == (16, 8, 2e-4)
    assert job.engine.dtype == "float32"
    assert job.environment.params == {}


def test_paths_are_relative_to_the_job_file(job_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    relative = Path(os.path.relpath(job_file, "/"))
    job = load_job(relative)
    assert job.model.path == job_file.parent / "model"
    assert job.run.out == job_file.parent / "runs"


def test_a_given_out_is_relative_to_the_working_directory(
    job_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert load_job(job_file, out=Path("mine")).run.out == tmp_path / "elsewhere" / "mine"


def test_home_is_expanded(job_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    job_file.write_text(job_file.read_text().replace('"model"', '"~/model"'))
    assert load_job(job_file).model.path == Path("/home/someone/model")


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("[train]\nsteps = 0", "train.steps = 0: allowed is a whole number from 1 to 10000000"),
        ("[train]\nsteps = 2.0", "train.steps = 2.0: allowed is a whole number"),
        ("[train]\nsteps = true", "train.steps = true: allowed is a whole number"),
        ('[train]\nsteps = "4"', 'train.steps = "4": allowed is a whole number'),
        ("[train]\nlearning_rate = nan", "train.learning_rate = NaN: allowed is a number above 0 to 1"),
        ("[train]\nclip_low = 1", "train.clip_low = 1: allowed is a number from 0 to below 1"),
        ('[engine]\ndtype = "float16"', 'engine.dtype = "float16": allowed is "float32" or "bfloat16"'),
        ("[engine]\nblock_size = 48", "engine.block_size = 48: allowed is a whole number from 32 to 1024, a multiple"),
        ("[train]\nstep = 4", "train.step: unknown key; did you mean train.steps?"),
        ("[train]\ngroup_size = 4", "train.group_size: unknown key; group_size is a key of [rollout]"),
        ("[alarm]\nzzz = 4", "alarm.zzz: unknown key; allowed are malformed_max"),
        ("[rolout]\ngroups = 4", "rolout: no such section; did you mean rollout?"),
        ("[environment.params]\nmap = [1, 2]", "environment.params.map = [1, 2]: allowed is text, a number"),
        ("[environment.params]\np = nan", "environment.params.p = NaN: allowed is text, a number"),
        ("[rollout]\nmax_new_tokens = 1024", "rollout.max_new_tokens = 1024: allowed is at most 1023"),
        (
            "[rollout]\ngroups = 1\ngroup_size = 2\n[train]\nminibatches = 3",
            "train.minibatches = 3: allowed is at most",
        ),
        ("[evaluation]\nfirst_seed = 0", "evaluation.first_seed = 0: allowed is a whole number from 1"),
        (
            "[evaluation]\nfirst_seed = 639",
            "evaluation.first_seed = 639: allowed is at least 640, which is train.steps x rollout.groups: training",
        ),
        ("[engine]\nport = 8000", "run.metrics_port = 8000: allowed is any port but engine.port, or 0"),
        (
            "[scheduler]\nport = 9000\n[weights]\nport = 9000",
            "weights.port = 9000: allowed is any port but scheduler.port, or 0",
        ),
        ("[evaluation]\nfirst_seed = 2147483647", "evaluation.first_seed = 2147483647: allowed is at most 2147483136"),
    ],
)
def test_a_wrong_key_is_named_with_its_value_and_what_is_allowed(job_file: Path, lines: str, said: str) -> None:
    job_file.write_text(job_file.read_text().replace('"demo"', '"demo"\nmetrics_port = 8000'))
    assert said in refused(with_lines(job_file, lines)).what


def test_a_missing_key_and_a_missing_section_are_named(job_file: Path) -> None:
    job_file.write_text("[run]\n[model]\npath = 'm'\n")
    what = refused(job_file).what
    assert "run.name: missing" in what
    assert "environment: missing: needs a table: [environment]" in what


def test_a_section_that_is_no_table(job_file: Path) -> None:
    job_file.write_text("train = 4\n" + job_file.read_text())
    assert "train = 4: allowed is a table: [train]" in refused(job_file).what


def test_all_problems_are_told_at_once_and_each_once(job_file: Path) -> None:
    with_lines(job_file, "[environment.params]\na = [1]\n[train]\nsteps = 0\nstep = 1\n[engine]\nport = -1\n")
    what = refused(job_file).what
    assert "4 problems" in what
    assert len(what.splitlines()) == 5


def test_all_rules_between_keys_are_told_at_once(job_file: Path) -> None:
    with_lines(job_file, "[rollout]\nmax_new_tokens = 4096\n[train]\nminibatches = 1024\n")
    assert "2 problems" in refused(job_file).what


def test_the_value_of_an_unknown_key_is_not_repeated(job_file: Path) -> None:
    assert "hunter2" not in str(refused(with_lines(job_file, "[train]\npassword = 'hunter2'")))


def test_a_syntax_error_has_its_line(job_file: Path) -> None:
    job_file.write_text('[run]\nname = "demo\n')
    assert "line 2" in refused(job_file).what


def test_training_may_use_every_seed_below_the_first_held_out_one(job_file: Path) -> None:
    assert load_job(with_lines(job_file, "[evaluation]\nfirst_seed = 640")).evaluation.first_seed == 640


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"a = {'[' * 100_000}", "nested more than 32 deep"),
        (f"a = {'[' * 33}{']' * 33}", "nested more than 32 deep, in a"),
        (f"train.steps{'.a' * 2_000} = 1", "nested more than 32 deep, in train"),
        (f"x = 1\ny = {'9' * 5000}", "more than 4300 digits (at line 2)"),
        (f"x = 1\ny = {'9_' * 5000}9", "more than 4300 digits (at line 2)"),
        ("x.y = 9223372036854775808", "the integer of x.y does not fit 64 bits"),
        (f"x = [0x{'f' * 9000}]", "the integer of x does not fit 64 bits"),
    ],
)
def test_what_no_reader_takes_is_said_in_plain_words(job_file: Path, text: str, said: str) -> None:
    job_file.write_text(text)
    assert said in refused(job_file).what


def test_a_byte_order_mark_is_no_part_of_the_text(job_file: Path, job: Job) -> None:
    job_file.write_text(job_file.read_text(), encoding="utf-8-sig")
    assert load_job(job_file) == job


def test_very_many_problems_are_counted(job_file: Path) -> None:
    with_lines(job_file, "[train]\n" + "".join(f"k{index} = 1\n" for index in range(1000)))
    lines = refused(job_file).what.splitlines()
    assert lines[0].endswith("1000 problems")
    assert len(lines) == 1 + PROBLEMS_SHOWN + 1
    assert lines[-1] == "  and 980 more"


def test_what_is_no_job_file(tmp_path: Path) -> None:
    assert "No such file" in refused(tmp_path / "none.toml").what
    assert "no regular file" in refused(tmp_path).what
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert "no regular file" in refused(pipe).what
    (tmp_path / "latin").write_bytes(b"[run]\nname = '\xe9'\n")
    assert "line 2 is not UTF-8" in refused(tmp_path / "latin").what
    (tmp_path / "huge").write_bytes(b"#" * (FILE_BYTES_MAX + 1))
    assert "more than" in refused(tmp_path / "huge").what


@pytest.mark.parametrize("key", ["model.path", "run.out"])
def test_a_path_with_nul_is_refused(job_file: Path, key: str) -> None:
    text = job_file.read_text().replace('path = "model"', 'path = "m\\u0000"' if key == "model.path" else 'path = "m"')
    job_file.write_text(
        text.replace('name = "demo"', 'name = "demo"\nout = "o\\u0000"' if key == "run.out" else 'name = "demo"')
    )
    assert f"{key} = " in refused(job_file).what


@pytest.mark.parametrize("path", ["o" * 256, "\u00e9" * 128, "o/" * 2048 + "o"])
def test_a_path_that_no_disk_takes_is_refused(job_file: Path, path: str) -> None:
    job_file.write_text(job_file.read_text().replace('"demo"', f'"demo"\nout = "{path}"'))
    assert "no p" in (what := refused(job_file).what)
    assert "longer than" in what


def test_a_path_that_is_too_long_only_with_its_folder_is_refused(job_file: Path) -> None:
    job_file.write_text(job_file.read_text().replace('"model"', f'"{"m/" * 2040}m"'))
    with pytest.raises(ConfigError, match=r"model\.path = .*longer than 4095"):
        load_job(job_file)
    with pytest.raises(ConfigError, match=r"--out = .*longer than 255"):
        load_job(with_lines(job_file, "").with_name("job.toml"), out=Path("o" * 300))


def test_a_job_file_whose_name_is_too_long(tmp_path: Path) -> None:
    assert "cannot be read: File name too long" in refused(tmp_path / ("j" * 300)).what


@pytest.mark.parametrize("name", ["", "Demo", "a/b", "-a", "a" * 25, "a\n"])
def test_a_name_that_cannot_be_part_of_an_id_is_refused(job_file: Path, name: str) -> None:
    job_file.write_text(toml.dumps({"run": {"name": name}, "model": {"path": "m"}, "environment": {"kind": "k"}}))
    assert "run.name = " in refused(job_file).what


def test_a_resolved_job_reads_back_equal(job_file: Path, tmp_path: Path) -> None:
    job = load_job(with_lines(job_file, '[environment.params]\nsize = 4\np = 0.8\nslippery = false\n"a b" = "é\\n"\n'))
    again = tmp_path / "elsewhere"
    again.mkdir()
    (again / "job.toml").write_text(job.to_toml(), encoding="utf-8")
    assert load_job(again / "job.toml") == job


SCALARS = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.text(st.characters(exclude_categories=["Cs"])),
)
KEYS = st.text(st.characters(exclude_categories=["Cs"]))
TABLES = st.dictionaries(KEYS, st.dictionaries(KEYS, SCALARS | st.dictionaries(KEYS, SCALARS, max_size=3), max_size=4))


@settings(derandomize=True)
@given(TABLES)
def test_toml_reads_back_as_written(tables: dict[str, dict[str, object]]) -> None:
    assert tomllib.loads(toml.dumps(tables)) == tables


def test_toml_refuses_what_it_cannot_write() -> None:
    with pytest.raises(TypeError, match="NoneType"):
        toml.dumps({"a": {"b": None}})
