"""What ROSE relies on inside vLLM is checked by name before it is used; `vllm_reliances` has the names.

An engine on a vLLM that moved any of these must not start, for it would count wrongly or update wrongly, and say
nothing. A name is found in a module, in a class, in what a class gives its instances, or in what a function asks of
others.
"""

from __future__ import annotations

import dis
import importlib
import inspect
from collections.abc import Iterable
from types import FunctionType
from typing import Any

from rose.errors import EngineError
from rose_executor.vllm_reliances import ENGINE, SUPPORTED, Reliance


def broken(relied_on: Iterable[Reliance] = ENGINE) -> list[str]:
    """What is missing, in words; empty if everything is in its place."""
    missing: list[str] = []
    for module, dotted, parameters in relied_on:
        try:
            target: Any = importlib.import_module(module)
            for name in dotted.split("."):
                target = _found(target, name)
            known = inspect.signature(target).parameters if parameters else {}
        except (ImportError, AttributeError) as error:
            missing.append(f"{module}.{dotted}: {error}")
            continue
        missing += [f"{module}.{dotted} has no parameter {name}" for name in parameters if name not in known]
    return missing


def _found(owner: Any, name: str) -> Any:
    """Raises AttributeError if `owner` has no such name.

    What a class gives its instances counts as its own, and so does what a function names in its body.
    """
    try:
        return getattr(owner, name)
    except AttributeError:
        if isinstance(owner, type) and any(_gives(base, name) for base in owner.__mro__):
            return None
        if isinstance(owner, FunctionType) and name in owner.__code__.co_names:
            return None
        raise


def _gives(owner: type, name: str) -> bool:
    """Whether a class declares an attribute of its instances, or a method of it assigns one."""
    if name in vars(owner).get("__annotations__", {}):
        return True
    methods = (inspect.unwrap(method) for method in vars(owner).values() if isinstance(method, FunctionType))
    codes = (method.__code__ for method in methods)
    return any(
        step.opname == "STORE_ATTR" and step.argval == name
        for code in codes
        if name in code.co_names
        for step in dis.get_instructions(code)
    )


def check(relied_on: Iterable[Reliance] = ENGINE) -> None:
    """Raises EngineError if this vLLM is not one that ROSE knows its way in."""
    _refuse(broken(relied_on))


def _refuse(missing: list[str]) -> None:
    if missing:
        raise EngineError(
            f"this vLLM lacks what ROSE relies on: {'; '.join(missing)}",
            expected=f"vLLM {' or '.join(SUPPORTED)}",
            to_do="install the locked version",
        )
