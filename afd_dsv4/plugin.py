# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The two functions that vLLM calls in every process: ``register`` and ``platform``.

Problem: vLLM calls a general plugin's function in the front end, before there is a configuration, and in every engine
core, worker and model-inspection process, where there is one that the function cannot see. An exception from it ends
the process; a plugin that fails to import is only logged and then missed.

Chosen way: ``register`` never raises. In a process that may still make a configuration it sets one attribute on the
*instance* of vLLM's current platform, so that ``check_and_update_config``, the platform's say in every configuration,
answers to us after it has answered to vLLM. No module and no class of anybody changes (one function of afd-plugin's
does, in mode afd where it is on, see ``compat/afd.py``): the class method is the identical object and is looked up anew
each time, so that it does not matter who wraps it when. Each configuration is decided on by itself; one is on, the next
off. Where the gate says on, the configuration gets the worker class of the adapter (a string, as for ``--worker-cls``)
and the settings with nothing left open, so that engine cores and workers need neither a probe nor our environment
variables. From then on ``validate_request``, the platform's say in every request, answers to us too, for a kind of
request that no configuration tells of and that would end the engine: it is refused alone. With ``AFD_DSV4_MODE=off`` no
attribute is set.

An operator's setting that cannot be read ends the configuration with one line (`InputError`): a server that runs
natively for hours although it was told otherwise is worse. A mode that is refused is a warning, and native code runs.

What it does not do: it changes no runner, worker or operator; the adapter's worker does, in the worker's process.
``platform`` always returns None, because two active platform plugins stop vLLM. Nothing here imports torch or vLLM.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from afd_dsv4 import __version__
from afd_dsv4.config import KEY, Mode, Settings, read, switched_off
from afd_dsv4.gate import NATIVE_WORKER, Decision, decide, off
from afd_dsv4.geometry import InputError

# A child of vLLM's own logger, so that the line appears where users look, with vLLM's handlers and level, and without
# importing vLLM.
_logger: Final = logging.getLogger("vllm.plugins.afd_dsv4")

_CONFIGURATIONS: Final = "check_and_update_config"
_REQUESTS: Final = "validate_request"
#: Modules of vLLM that load plugins where the configuration is already made. The loader passes its plugins nothing, so
#: its caller is all that tells such a process apart; one that is not told apart has an attribute that nobody calls.
_CONFIGURED: Final = frozenset({"vllm.v1.engine.core", "vllm.v1.worker.worker_base"})
_LOADER: Final = "vllm.plugins"


@dataclass(frozen=True)
class PluginState:
    """What the plugin did in this process.

    :param pid: process that did it; a forked child that inherited the state sees its parent's id here.
    :param calls: how often :func:`register` ran.
    :param watching: whether configurations made in this process are looked at.
    :param configurations: how many were looked at.
    :param settings: of the last one, None where there was none or ``error`` is set.
    :param decision: on the last one, or on the process where nothing else is asked; None where ``error`` is set.
    :param stack: the installed versions, None as long as nobody asked.
    :param error: what went wrong last, None where nothing did.
    """

    pid: int
    calls: int
    watching: bool = False
    configurations: int = 0
    settings: Settings | None = None
    decision: Decision | None = None
    stack: str | None = None
    error: str | None = None


_state: PluginState | None = None
_reported: set[tuple[int, str]] = set()


def state() -> PluginState | None:
    """Return what the plugin last did in this process, None if :func:`register` never ran."""
    return _state


def register() -> None:
    """Entry point of the group ``vllm.general_plugins``: watch, report, never raise. May run any number of times."""
    global _state
    before = _state or PluginState(os.getpid(), 0)
    _state = replace(before, pid=os.getpid(), calls=before.calls + 1, error=None)
    try:
        if not _is_configured():
            _state = replace(_state, watching=_watch_configurations())
        if switched_off(os.environ):
            unwatch()
            _state = replace(_state, watching=False)
            _decided(Settings(), off("the environment says so; additional_config is not looked at"))
    except Exception as error:  # an exception here would end the host process
        _failed(error)


def platform() -> None:
    """Entry point of the group ``vllm.platform_plugins``: claim no platform, ever."""


def unwatch() -> None:
    """Take our attributes off vLLM's current platform, and let afd-plugin choose. Does nothing where there are none."""
    if ours := sys.modules.get("afd_dsv4.compat.afd"):
        ours.undo()
    target = getattr(sys.modules.get("vllm.platforms"), "_current_platform", None)
    for name in (_CONFIGURATIONS, _REQUESTS):
        watch = getattr(target, "__dict__", {}).get(name)
        if isinstance(watch, _Watch):
            if watch.before is None:
                delattr(target, name)
            else:
                setattr(target, name, watch.before)


class _Watch:
    """Stands in for one method of one platform instance: calls that, then us."""

    def __init__(self, target: Any, name: str, then: Callable[..., None]) -> None:
        self._class, self._name, self._then = type(target), name, then
        self.before = vars(target).get(name)  # nobody's, as far as we know

    def __call__(self, *args: Any, **named: Any) -> None:
        native = self.before or getattr(self._class, self._name)
        native(*args, **named)
        self._then(*args, **named)


def configure(vllm_config: Any, platform_class: type) -> None:
    """Decide on one configuration, report, and where the plugin is on, enter the adapter's worker and our settings.

    :param vllm_config: vLLM's ``VllmConfig``, complete as far as the platform is concerned.
    :param platform_class: class of vLLM's current platform.
    :raises InputError: settings that cannot be read.
    """
    global _state
    before = _state or PluginState(os.getpid(), 0)
    try:
        if vllm_config.model_config is None:  # an empty configuration, such as vLLM makes for its own defaults
            return
        _state = replace(before, pid=os.getpid(), configurations=before.configurations + 1)
        _decide(vllm_config, platform_class)
    except InputError as error:
        _failed(error)
        raise
    except Exception as error:  # a mistake of ours; native code is still right
        _failed(error)


def _decide(vllm_config: Any, platform_class: type) -> None:
    # Imported here: they read what is installed, which a process that makes no configuration need not pay for.
    from afd_dsv4.compat.adapters import full_name, worker_class
    from afd_dsv4.compat.stack import installed

    global _state
    assert _state is not None
    stack = installed()
    _state = replace(_state, stack=str(stack))
    additional, parallel = vllm_config.additional_config, vllm_config.parallel_config
    with_afd = isinstance(additional, Mapping) and additional.get("afd") is not None
    ours = worker_class(full_name(stack.name, stack.afd) if with_afd else stack.name)
    # vLLM makes further configurations from one that has our worker and our settings already (for a draft model).
    again = ours is not None and parallel.worker_cls == ours
    settings = read(additional, {} if again else os.environ)
    if settings.mode is Mode.OFF:
        decision = off("no other mode was asked for")
    else:
        from afd_dsv4.compat.contract import verify
        from afd_dsv4.compat.facts import facts_from

        verdict = verify(stack, afd=with_afd)
        decision = decide(settings, facts_from(vllm_config, platform_class, stack, verdict))
    if decision.settings:
        if with_afd and parallel.worker_cls == NATIVE_WORKER:
            from afd_dsv4.compat.afd import let_ours_stand

            let_ours_stand(verdict)
        _watch(_platform(), _REQUESTS, _refuse_streaming_input)
        # A mapping of its own: the operator's may be used for another engine.
        vllm_config.additional_config = {**additional, KEY: decision.settings.as_mapping()}
        parallel.worker_cls = ours
    elif again:
        why = f"{ours}, although the plugin is off: {decision.line()}"
        raise InputError("worker_cls", why, "leave it to the plugin, which enters it where it is on")
    if decision.requested is not Mode.OFF:
        from afd_dsv4 import metrics

        metrics.decided(decision)
    _decided(settings, decision)


def _is_configured() -> bool:
    """Whether the loader was called from where a configuration exists already."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__") != _LOADER:
        frame = frame.f_back
    while frame.f_back and frame.f_globals.get("__name__") == _LOADER:
        frame = frame.f_back
    return frame.f_globals.get("__name__") in _CONFIGURED


def _watch_configurations() -> bool:
    """Answer to every configuration from now on; False in a process without vLLM."""
    if "vllm" not in sys.modules:
        return False
    target = _platform()
    _watch(target, _CONFIGURATIONS, partial(configure, platform_class=type(target)))
    return True


def _platform() -> Any:
    # vLLM chooses its platform at this access, if it has not yet; it must before it makes a configuration.
    return importlib.import_module("vllm.platforms").current_platform


def _watch(target: Any, name: str, then: Callable[..., None]) -> None:
    if not isinstance(vars(target).get(name), _Watch):
        setattr(target, name, _Watch(target, name, then))


def _refuse_streaming_input(*_: Any, **__: Any) -> None:
    """Refuse a request that is to stop and go on with more input, on an engine with the plugin.

    It keeps its tail while it waits for input. The scheduler takes it for waiting, not for running, and admits others;
    they find no tail, and the engine ends. The platform is told neither that a request is one of those nor which engine
    it is for; the caller knows both (`vllm/v1/engine/input_processor.py:InputProcessor.process_inputs`). Requests that
    were not made there are not seen.

    :raises InputError: vLLM hands it to whoever sent the request; the engine goes on.
    """
    caller = sys._getframe(2).f_locals  # of `_Watch`, and of vLLM
    if not caller.get("resumable"):
        return
    from afd_dsv4.compat.adapters import ADAPTERS

    if caller["self"].vllm_config.parallel_config.worker_cls in {adapter.worker for adapter in ADAPTERS.values()}:
        from afd_dsv4 import metrics

        found = "a request that stops and goes on with more input would keep its place while it waits"
        error = InputError("streaming input", found, "send whole prompts, or serve it with mode 'off'")
        metrics.request_refused(str(error))
        raise error


def _decided(settings: Settings, decision: Decision) -> None:
    global _state
    assert _state is not None
    _state = replace(_state, settings=settings, decision=decision, error=None)
    stack = f"; stack: {_state.stack}" if _state.stack else ""
    _report(logging.WARNING if decision.refused else logging.INFO, f"{decision.line()}{stack}")


def _failed(error: Exception) -> None:
    """Stay off. A logger that fails too must not hurt the host; the state still tells."""
    global _state
    assert _state is not None
    text = " ".join(str(error).split())
    text = text if isinstance(error, InputError) else f"{type(error).__name__}: {text}"
    _state = replace(_state, settings=None, decision=None, error=text)
    try:
        _report(logging.ERROR, f"stays off: {text}")
    except Exception:
        return


def _report(level: int, line: str) -> None:
    """Log once per process and outcome: vLLM may load plugins again, and the log should not fill up."""
    key = (os.getpid(), line)
    if key not in _reported:
        _reported.add(key)
        _logger.log(level, "afd-dsv4 %s, %s", __version__, line)
