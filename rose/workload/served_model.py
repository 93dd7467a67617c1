"""Which model a serving engine has: asked for until the engine is there."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import aiohttp

from rose.errors import EngineError
from rose.waits import WaitBoard

_PAUSE_S = 0.05
_DETAIL_CHARS = 300


@dataclass(frozen=True, slots=True)
class ServedModel:
    """`context_tokens` is the longest prompt and answer together, None if the engine does not tell."""

    name: str
    context_tokens: int | None


async def served_model(url: str, timeout_s: float, waits: WaitBoard) -> ServedModel:
    """The first model that the engine at `url` lists, once it answers.

    Raises DeadlineExceeded if it does not in time, EngineError if it answers something else.
    """
    return await waits.within(
        _first_model(url),
        "list of models",
        url,
        timeout_s,
        boundary="engine",
        to_do="start the engine, or name another address",
    )


async def _first_model(url: str) -> ServedModel:
    async with aiohttp.ClientSession() as session:
        while True:
            try:
                async with session.get(f"{url}/v1/models") as response:
                    listed = await response.json(content_type=None)
                model = listed["data"][0]
                context = model.get("max_model_len")
                return ServedModel(str(model["id"]), context if isinstance(context, int) else None)
            except aiohttp.InvalidURL as error:
                raise EngineError(f"{url!r} is no address", expected="one like http://127.0.0.1:8000") from error
            except (aiohttp.ClientConnectionError, ConnectionError):
                await asyncio.sleep(_PAUSE_S)
            except (aiohttp.ClientError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
                raise EngineError(
                    f"{url}/v1/models: {type(error).__name__}: {str(error)[:_DETAIL_CHARS]}",
                    expected="an OpenAI list of models",
                ) from error
