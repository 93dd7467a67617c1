"""What of a child's log becomes part of an error message: its cause and what tells something, never the usual noise."""

from __future__ import annotations

from pathlib import Path

from rose_executor.child_log import ChildLog

CORE = "(EngineCore pid=7) ERROR 11-29 14:23:00 [core.py:1510]"
# One of each kind that a healthy start writes.
NOISE = """\
W1129 14:27:17.670000 23434 site-packages/torch/_library/triton.py:53] Triton not available
<frozen runpy>:128: RuntimeWarning: 'rose_executor.engine_main' found in sys.modules after import of package
(APIServer pid=6) WARNING 11-29 14:27:19 [vllm.py:725] Model Runner V2 requires Triton
WARNING 11-29 14:27:19 [base.py:380] ValueError: Tokenizer not available when `skip_tokenizer_init=True`
/lib/dispatcher.py:138: FutureWarning: `torch.distributed.reduce_op` is deprecated
  if hasattr(value, "__dict__"):
[W1129 14:27:20.004756627 utils.cpp:68] Warning: NUMA binding
Loading safetensors checkpoint shards:   0% Completed | 0/1 [00:00<?, ?it/s]
Loading safetensors checkpoint shards: 100% Completed | 1/1 [00:00<00:00, 292.63it/s]

INFO:     Started server process [23552]
"""


def log_of(folder: Path, text: str) -> ChildLog:
    log = ChildLog(folder / "log")
    log.path.write_text(text)
    return log


def test_a_healthy_start_tells_nothing(tmp_path: Path) -> None:
    assert ChildLog(tmp_path / "no such log").last_words() == ""
    log = log_of(tmp_path, NOISE)
    assert (log.cause(), log.tail(), log.last_words()) == ("", "", "")
    assert "Triton" in log.text()


def test_what_tells_something_survives_among_noise_with_the_cause_first(tmp_path: Path) -> None:
    traceback = (
        "Traceback (most recent call last):\n"
        '  File "fresh_probe_main.py", line 22, in score\n'
        "    engine = LLM(\n"
        "pydantic_core.ValidationError: 1 error for ModelConfig\n"
    )
    log = log_of(tmp_path, NOISE + traceback + NOISE)
    assert log.last_words() == (
        ": pydantic_core.ValidationError: 1 error for ModelConfig; last lines of its log:\n" + traceback.strip()
    )


def test_the_cores_last_error_counts_more_than_the_servers(tmp_path: Path) -> None:
    log = log_of(
        tmp_path,
        "".join(f"{CORE} line {i}\n" for i in range(3_000))
        + f"{CORE} KeyError: 'first'\n{CORE} ValueError: no room\n"
        + "(APIServer pid=6) ERROR 11-29 14:23:00 [x.py:1] RuntimeError: see above\n"
        + "the end\n",
    )
    assert log.cause() == log.core_cause() == "ValueError: no room"
    assert len(log.tail().splitlines()) == 12
    assert log.tail().endswith("the end")


def test_the_core_of_vllm_030_writes_no_process_before_its_errors(tmp_path: Path) -> None:
    log = log_of(
        tmp_path,
        "ERROR 11-29 14:23:00 [core.py:1366] ValueError: no room\n"
        "(EngineCore pid=7) FileNotFoundError: what led to it\n"
        "(APIServer pid=6) RuntimeError: see above\n",
    )
    assert log.cause() == log.core_cause() == "ValueError: no room"


def test_a_line_printed_twice_is_shown_once(tmp_path: Path) -> None:
    again = CORE.replace("14:23:00", "14:23:09").replace("pid=7", "pid=8")
    log = log_of(tmp_path, f"{CORE} OSError: gone\nbetween\n{again} OSError: gone\nOSError: gone\n")
    assert log.tail() == "between\nOSError: gone"


def test_an_earlier_childs_last_words_are_not_this_ones(tmp_path: Path) -> None:
    log_of(tmp_path, "ValueError: of the one before\n")
    log = ChildLog(tmp_path / "log")
    with log.path.open("a") as file:
        file.write("KeyError: of this one\n")
    assert (log.cause(), log.tail()) == ("KeyError: of this one", "KeyError: of this one")
