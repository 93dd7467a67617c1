"""What every room's tests share: a throw-away model, one warm process and one live engine for the whole run.

Under xdist every test file that uses the mark `engine` lands on one worker and shares that engine; so do those with
the fixture `ray_site` and their Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

T = TypeVar("T")

# Read by torch when it is first imported; two cores are shared by many tests.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell's background jobs and `nohup` ignore these, and so would every process that a test starts and then signals.
for _signum, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_signum) is signal.SIG_IGN:
        signal.signal(_signum, _handler)


# The same examples every time: a run that fails fails again. New ones are looked for with HYPOTHESIS_PROFILE=search.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("search", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

_LEFT_OUT = ("gpu", "slow", "whole_run")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    asked_for = config.option.markexpr
    for item in items:
        for name in _LEFT_OUT:
            if item.get_closest_marker(name) and name not in asked_for:
                item.add_marker(pytest.mark.skip(reason=f"ask for it with -m {name}"))


class SharingScheduling(LoadScopeScheduling):
    """Sends every file that uses the shared engine to one worker, those with the shared Ray to one, and any other test
    anywhere.

    xdist's own `xdist_group` does nothing with pytest 9.2 (pytest-xdist issue 1386).
    """

    def _split_scope(self, nodeid: str) -> str:
        return _shares(self.config.rootpath / nodeid.partition("::")[0]) or nodeid


@functools.cache
def _shares(file: Path) -> str:
    """What the tests of a file share with those of others; empty if nothing."""
    text = file.read_text()
    return "engine" if "pytest.mark.engine" in text else "ray" if "ray_site" in text else ""


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> SharingScheduling:
    return SharingScheduling(config, log)


@pytest.fixture(autouse=True, scope="module")
def _no_busy_threads() -> Iterator[None]:
    """What a file's tests leave running costs those behind it nothing: a thread that spins is found where it began."""
    yield
    deadline = time.monotonic() + 120.0  # what is cut off from its servers may look for them for a minute
    while (share := _busy_share(0.02)) > 0.5 and _busy_share(0.2) > 0.5:
        if time.monotonic() >= deadline:
            pytest.fail(f"threads that these tests left use {share:.1f} cores and do not end: {_busiest_threads()}")


def _busiest_threads() -> str:
    """The names of this process's threads, the kernel's and Python's, those first that have used most."""
    import psutil

    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    used = sorted(psutil.Process().threads(), key=lambda thread: -thread.user_time - thread.system_time)
    told = []
    for thread in used[:5]:
        with contextlib.suppress(OSError):
            kernels = Path(f"/proc/self/task/{thread.id}/comm").read_text().strip()
            told.append(f"{names.get(thread.id, kernels)} ({thread.user_time + thread.system_time:.1f} s)")
    return ", ".join(told)


def _busy_share(seconds: float) -> float:
    """How many cores this process uses while it sleeps."""
    started, used = time.monotonic(), time.process_time()
    time.sleep(seconds)
    return (time.process_time() - used) / (time.monotonic() - started)


# Beside the one in the environment; made by `./dev test`, if it can.
_OLDER_VLLM = Path(__file__).parents[1] / ".vllm-0.30"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    from rose_executor.vllm_reliances import SUPPORTED

    if metafunc.definition.get_closest_marker("each_vllm"):
        asked = "rig" if "rig" in metafunc.fixturenames else "vllm_env"
        metafunc.parametrize(asked, SUPPORTED, indirect=True, scope="session")


def _vllm_env(version: str) -> dict[str, str]:
    """What a process is started with that imports this vLLM, and modules of these tests. Skips where it is not here."""
    from rose_executor.engine_env import IMPORT_ENV
    from rose_executor.vllm_reliances import SUPPORTED

    packages = None if version == SUPPORTED[0] else _OLDER_VLLM
    if packages is not None and not packages.is_dir():
        pytest.skip(f"vLLM {version} is not in {packages}: ./dev test fetches it where it can")
    path = (packages, Path(__file__).with_name("executor"), os.environ.get("PYTHONPATH"))
    return {**IMPORT_ENV, "PYTHONPATH": os.pathsep.join(str(part) for part in path if part)}


VOCABULARY = 96


def build_tiny_model(folder: Path, seed: int = 0) -> Path:
    """A random Qwen3 of 2 layers with a tied head and a byte-level tokenizer, as a model folder."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[: VOCABULARY - 2]
    tokenizer = Tokenizer(models.BPE({"<pad>": 0, "<end>": 1, **{c: i + 2 for i, c in enumerate(letters)}}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>").save_pretrained(folder)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=1,
        pad_token_id=0,
        # Large enough that a change of weights is a change of behaviour.
        initializer_range=0.2,
    )
    torch.manual_seed(seed)
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder; tests must not write into it."""
    return build_tiny_model(tmp_path_factory.mktemp("tiny"))


class EngineRig:
    """One event loop, one warm process and one live engine on the tiny model, for a whole test run.

    `run` drives a coroutine to its end. `refresh` brings the shared engine back to version 0 after a test
    that changed its weights or killed it.
    """

    def __init__(self, runner: asyncio.Runner, folder: Path, model: Path, env: dict[str, str]) -> None:
        from rose.waits import WaitBoard

        self._env = env

        self._runner = runner
        self.folder = folder
        self.model = model
        self.waits = WaitBoard()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(coroutine)

    async def open(self) -> None:
        from rose_executor.token_route import open_session
        from rose_executor.warm_process import WarmProcess

        # A test may also have a module of its own run where vLLM is imported already.
        self.warm = await WarmProcess.start(self.waits, log_path=self.folder / "warm.log", env=self._env)
        self.session = open_session()
        self.engine = self.new_engine("engine-0")
        await self.engine.start(0)

    async def close(self) -> None:
        await self.session.close()
        await self.engine.stop()
        await self.warm.close()

    def new_engine(self, engine_id: str, **changes: Any) -> Any:
        """Another engine with the rig's settings, not started."""
        from rose_executor.engine_process import EngineProcess
        from rose_executor.engine_settings import EngineSettings

        settings: dict[str, Any] = {
            "engine_id": engine_id,
            "model_dir": self.model,
            "runtime_dir": self.folder,
            "log_path": self.folder / f"{engine_id}.log",
            "max_model_len": 512,
            "max_num_seqs": 16,
            "kv_cache_bytes": 16 * 2**20,
            "stream_interval": 4,
        }
        return EngineProcess(EngineSettings(**{**settings, **changes}), self.warm, self.waits)

    def route(self, **changes: Any) -> Any:
        """A token route to the shared engine's live incarnation."""
        from rose_executor.token_route import TokenRoute

        options = {"engine_id": "engine-0", "waits": self.waits, **changes}
        return TokenRoute(self.engine.base_url, self.session, **options)

    async def refresh(self) -> None:
        await self.engine.stop()
        await self.engine.start(0)


@pytest.fixture(scope="session")
def rigs(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Callable[..., EngineRig]]:
    """A rig for each version of vLLM that is asked for, by default that in the environment."""
    from rose_executor.vllm_reliances import SUPPORTED

    opened: dict[str, EngineRig] = {}
    with asyncio.Runner() as runner:

        def of(version: str = SUPPORTED[0]) -> EngineRig:
            if version not in opened:
                env = _vllm_env(version)
                # Short, because it holds unix sockets.
                rig = EngineRig(runner, tmp_path_factory.mktemp("rig"), tiny_model, env)
                rig.run(rig.open())
                opened[version] = rig
            return opened[version]

        yield of
        for rig in opened.values():
            rig.run(rig.close())


@pytest.fixture(scope="session")
def rig(rigs: Callable[..., EngineRig], request: pytest.FixtureRequest) -> EngineRig:
    """The shared engine; a test that uses it is marked `engine`, and `each_vllm` too where every version counts."""
    return rigs(request.param) if hasattr(request, "param") else rigs()


@pytest.fixture(scope="session")
def vllm_env(request: pytest.FixtureRequest) -> dict[str, str]:
    """What to start a process with that has one version of vLLM; for tests marked `each_vllm`, without a rig."""
    return _vllm_env(request.param)


@pytest.fixture
def fresh_rig(rig: EngineRig) -> Iterator[EngineRig]:
    """The shared engine for a test that spoils it: put back to version 0 afterwards."""
    yield rig
    rig.run(rig.refresh())
