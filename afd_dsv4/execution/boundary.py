# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Nothing transient crosses the boundary between Attention and FFN: what is handed to a connector is looked at first.

Problem: a connector sends tensors while the next launches already write the workspace, keeps them in queues until the
answer comes, and pickles nothing, so a view of a state table or of a page would be sent as whatever lies there later.
Way: every tensor in a call is compared by the range of its whole storage with all memory of the runtime, so that views,
slices and aliases of any kind are seen and equal content elsewhere is not; and every other object by its type: ours
that stand for workspace (leases, slots, executions, page lists) must not be there either. Whatever cannot be looked
into is refused, too: an audit that passes over an object says nothing. So containers and plain values of a subclass are
looked at for attributes as well, those of their class among them, arrays for what their memory belongs to, tensors for
their gradient; and nothing is asked of an object that its class could answer otherwise than its memory does. The
runtime's memory is found by looking through the runtime, so that a tensor that is added to it is not forgotten; the
host's arrays of who owns which page are in it, since every plan overwrites them in place. A call costs what its payload
has, and one search in as many ranges as the runtime has storages, which no layer adds to.
Not here: who calls it (adapters, at debug level; tests, always), and what a connector does below (operators, groups).
It finds memory once; a runtime takes all of it in its constructor. So arrays that a plan makes anew are not found, the
page lists' among them: nothing writes them once they are planned, and a list itself is refused by its type. Code is not
looked into: what a property or a function would give is not in the object.

Source of what crosses: vllm-project/afd-plugin, afd_plugin/connectors/{base,metadata}.py, npu/{async_cam,camp2p}.py.
"""

from __future__ import annotations

import bisect
import dataclasses
import enum
import functools
import types
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any, Final, NamedTuple, Protocol, cast

import numpy as np
import torch

from afd_dsv4.geometry import CompressorKind
from afd_dsv4.tail.store import TailStore
from afd_dsv4.workspace.arena import WorkspaceArena
from afd_dsv4.workspace.trace import Trace

#: Deeper than any payload; a graph of objects that goes deeper is not one.
MAX_DEPTH: Final = 12
#: More than any payload has.
MAX_OBJECTS: Final = 20_000
#: Objects of these packages stand for workspace, tails or whoever runs on them.
_OURS: Final = tuple(f"afd_dsv4.{name}." for name in ("workspace", "tail", "compressor", "execution"))
#: Where a connector keeps what it will still need when the answer comes (CAMAsyncAFDConnector).
PENDING: Final = "_pending_attention_payloads"
_PLAIN: Final = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    enum.Enum,
    np.bool_,
    np.number,
    np.character,
    np.datetime64,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)


class BoundaryViolation(RuntimeError):
    """Something of the workspace, or something that cannot be looked into, was about to be handed to a connector.

    Attributes:
        call: whose argument or result it is.
        field: where in it, as one would write it: `context.states.group_list[0]`.
        found: what it is or lies in, and whose that is.
    """

    def __init__(self, call: str, field: str, found: str, remedy: str) -> None:
        super().__init__(f"{call}: {field} {found}; {remedy}")
        self.call = call
        self.field = field
        self.found = found


class Runtime(Protocol):
    """What the audit asks of a runtime by name, to say whose memory it found; all else it finds itself."""

    @property
    def pools(self) -> Mapping[CompressorKind, torch.Tensor]:
        """Pages by kind."""

    @property
    def store(self) -> TailStore:
        """Who owns which page."""

    @property
    def arena(self) -> WorkspaceArena[Any]:
        """Who holds which workspace slot."""


class Region(NamedTuple):
    """One storage of the runtime.

    Attributes:
        begin: address of its first byte.
        end: address behind its last.
        path: where in the runtime it was found: attribute, then keys, indices and attributes.
        memory: keeps the address from being given to somebody else.
    """

    begin: int
    end: int
    path: tuple[Any, ...]
    memory: torch.Tensor | np.ndarray[Any, Any]

    def __str__(self) -> str:
        """The path as one would write it."""
        return "".join(f".{part}" if isinstance(part, str) else f"[{_key(part)}]" for part in self.path).lstrip(".")


class Boundary:
    """Audits the calls of a worker's connectors.

    Args:
        runtime: the worker's; None on a worker that has none, as in the role FFN: types are looked at all the same.
        more: other objects of ours that have memory, by name: an adapter's stand-ins for the state layers.
        opaque: types of objects that are not looked into, but for their queues of pending payloads: connectors.

    Attributes:
        calls: calls audited.
        tensors: tensors seen in them.
        regions: the runtime's storages, by device.
    """

    def __init__(
        self, runtime: Runtime | None, more: Mapping[str, object] | None = None, *, opaque: tuple[type, ...] = ()
    ) -> None:
        self._runtime = runtime
        self._opaque = (*opaque, *_process_groups())
        self._ways: dict[type, _Way] = {}
        self.calls = 0
        self.tensors = 0
        self.regions: dict[torch.device, list[Region]] = {}
        roots = {"": runtime, **(more or {})}
        for path, tensor in owned_tensors(roots):
            memory = tensor.untyped_storage()
            if memory.nbytes():
                region = Region(memory.data_ptr(), memory.data_ptr() + memory.nbytes(), path, tensor)
                self.regions.setdefault(tensor.device, []).append(region)
        for path, array in _owned(roots, np.ndarray):
            begin, end = _bounds(array)
            if end > begin:
                self.regions.setdefault(torch.device("cpu"), []).append(Region(begin, end, path, array))
        for device, found in self.regions.items():
            self.regions[device] = _apart(found)
        self._begins = {device: [region.begin for region in found] for device, found in self.regions.items()}

    def check(self, call: str, given: Mapping[str, object]) -> None:
        """Look at all that a call is given, or returns.

        Args:
            call: for the error: connector and method.
            given: arguments by name, keyword arguments among them; or what is returned.

        Raises:
            BoundaryViolation: the first thing found that must not be there.
        """
        self.calls += 1
        walk = _Walk(self, call)
        for name, value in given.items():
            walk.look(value, name, 0)
        self.tensors += walk.tensors

    def check_pending(self, call: str, connector: object) -> None:
        """Look at what a connector keeps until the answer comes. Does nothing for one that keeps nothing.

        Raises:
            BoundaryViolation: see `check`.
        """
        self.check(call, {f"connector.{PENDING}": getattr(connector, PENDING, None)})

    def region_of(self, begin: int, end: int, device: torch.device) -> Region | None:
        """The region that a range of bytes reaches into, or None."""
        begins = self._begins.get(device)
        if begins is None:
            return None
        at = bisect.bisect_left(begins, end) - 1
        if at < 0:
            return None
        region = self.regions[device][at]
        return region if region.end > begin else None

    def describe(self, region: Region, address: int) -> str:
        """What lies at an address of a region, and whose it is."""
        where, runtime = str(region), self._runtime
        if runtime is None or not region.path:
            return where
        for kind, pool in runtime.pools.items():
            if pool.untyped_storage().data_ptr() == region.begin:
                page = (address - region.begin) // pool[0].nbytes
                with runtime.arena.lock:
                    open_ = [str(slot.lease.execution) for slot in runtime.arena.slots if slot.lease is not None]
                    owner = runtime.store.whose(kind.ratio, page)
                held = f"open executions: {'; '.join(open_)}" if open_ else "no execution is open"
                return f"{where}, the pool of {kind.value}, page {page} ({owner}; {held})"
        slot = next((part for part in region.path[1:2] if isinstance(part, int)), None)
        if region.path[0] in ("tables", "lists", "areas") and slot is not None:
            if slot >= len(runtime.arena.slots):
                return f"{where}, what forwards without an execution get"
            with runtime.arena.lock:
                held_by, last = runtime.arena.slots[slot].lease, runtime.arena.slots[slot].last
            if held_by is not None:
                return f"{where}, workspace slot {slot}, held by {held_by.execution}"
            return f"{where}, workspace slot {slot}, " + (
                f"last held by {last.execution}" if last else "held by nobody"
            )
        return where

    def way(self, cls: type) -> _Way:
        """How objects of a class are looked at; worked out when the first one comes."""
        found = self._ways.get(cls)
        if found is None:
            found = self._ways[cls] = self._work_out(cls)
        return found

    def _work_out(self, cls: type) -> _Way:
        if _ours(cls):
            return _Way.OURS
        if issubclass(cls, _PLAIN):
            return _Way.ATTRIBUTES if cls.__dictoffset__ or _slots(cast(Any, cls)) else _Way.PLAIN
        ways: list[tuple[_Way, tuple[type, ...]]] = [
            (_Way.TENSOR, (torch.Tensor,)),
            (_Way.ARRAY, (np.ndarray,)),
            (_Way.OPAQUE, self._opaque),
            (_Way.TYPE, (type,)),
            (_Way.MAPPING, (Mapping,)),
            (_Way.SEQUENCE, (list, tuple, deque)),
            (_Way.SET, (Set,)),
        ]
        for way, classes in ways:
            if issubclass(cls, classes):
                return _Way.NAMED if issubclass(cls, tuple) and hasattr(cls, "_fields") else way
        return _Way.ATTRIBUTES if dataclasses.is_dataclass(cls) else _Way.UNKNOWN


class _Way(enum.Enum):
    """How an object is looked at."""

    PLAIN = enum.auto()  # there is nothing in it
    TENSOR = enum.auto()
    ARRAY = enum.auto()
    OURS = enum.auto()  # it stands for workspace
    OPAQUE = enum.auto()
    TYPE = enum.auto()
    MAPPING = enum.auto()
    SEQUENCE = enum.auto()
    NAMED = enum.auto()  # a named tuple
    SET = enum.auto()
    ATTRIBUTES = enum.auto()  # a dataclass, or a plain value with attributes
    UNKNOWN = enum.auto()


def _ours(cls: type) -> bool:
    return any(f"{base.__module__}.".startswith(_OURS) for base in cls.__mro__)


class _Walk:
    """One look through what a call is given."""

    def __init__(self, boundary: Boundary, call: str) -> None:
        self._boundary = boundary
        self._call = call
        self._seen: dict[int, object] = {}  # kept, so that no number comes twice
        self.tensors = 0

    def look(self, value: object, field: str, depth: int) -> None:
        way = self._boundary.way(type(value))
        if way is _Way.PLAIN or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if depth > MAX_DEPTH or len(self._seen) > MAX_OBJECTS:
            raise self._violation(field, f"is {depth} objects deep, behind {len(self._seen)} others", "send less")
        if way is _Way.TENSOR:
            self._tensor(cast(torch.Tensor, value), field)
        elif way is _Way.OURS or (way is _Way.TYPE and _ours(cast(type, value))):
            cls = value if isinstance(value, type) else type(value)
            raise self._violation(field, f"is a {cls.__qualname__} of {cls.__module__}: {_words(value)}", _KEEP)
        elif way is _Way.ARRAY:
            self._array(cast(Any, value), field)
        try:
            parts = self._parts(cast(Any, value), way, field)
        except BoundaryViolation:
            raise
        except Exception as error:  # of the object's own code
            found = f"is a {_name(value)}, which raises {type(error).__name__} where it is looked into"
            raise self._violation(field, found, _PLAINLY) from error
        for name, part in parts:
            self.look(part, name, depth + 1)

    def _parts(self, value: Any, way: _Way, field: str) -> Iterable[tuple[str, object]]:
        """What an object consists of, each with its name."""
        parts: list[tuple[str, object]] = []
        match way:
            case _Way.OPAQUE:
                return [(f"{field}.{PENDING}", getattr(value, PENDING, None))]
            case _Way.TENSOR:
                if not _true(value, "is_leaf"):
                    raise self._violation(
                        field, "has a graph of gradients, which the audit does not look into", _PLAINLY
                    )
                parts = [(f"{field}.grad", _true(value, "grad"))]
            case _Way.ARRAY:
                parts = [(f"{field}.base", value.base)]
            case _Way.MAPPING:
                made_up = getattr(type(value), "__missing__", None)
                if made_up not in (None, *_HARMLESS):
                    found = f"is a {_name(value)}, which makes up entries that it does not have (__missing__)"
                    raise self._violation(field, found, "send a dict")
                items = [*(dict.items(value) if isinstance(value, dict) else value.items())]
                parts = [(f"{field}[{_key(key)}]", part) for key, part in items]
                parts += [(f"{field}.keys()", key) for key, _ in items]
            case _Way.SEQUENCE:
                parts = [(f"{field}[{index}]", part) for index, part in enumerate(_items(value))]
            case _Way.NAMED:
                items, names = _items(value), type(value)._fields
                if not isinstance(names, tuple) or len(names) != len(items):  # they say nothing of what is in it
                    names = range(len(items))
                parts = [(f"{field}.{name}", part) for name, part in zip(names, items, strict=True)]
            case _Way.SET:
                parts = [(f"{field}.item", part) for part in _items(value)]
            case _Way.UNKNOWN:
                raise self._violation(
                    field,
                    f"is a {_name(value)}, which the audit cannot look into",
                    "name its type among the opaque ones if it holds no tensor",
                )
            case _Way.TYPE:
                return [(f"{field}.{name}", part) for name, part in _class_level(value)]
            case _Way.PLAIN | _Way.OURS:
                return ()
        parts += [(f"{field}.{name}", part) for name, part in _class_level(type(value))]
        return [*parts, *((f"{field}.{name}", part) for name, part in _named(value))]

    def _tensor(self, tensor: torch.Tensor, field: str) -> None:
        self.tensors += 1
        device: torch.device = _true(tensor, "device")
        if device.type == "meta":
            return
        try:
            with torch._C.DisableTorchFunctionSubclass():
                memory = torch.Tensor.untyped_storage(tensor)
                begin, size = memory.data_ptr(), memory.nbytes()
                first = torch.Tensor.data_ptr(tensor)
        except (RuntimeError, NotImplementedError) as error:
            raise self._violation(
                field, f"is a {type(tensor).__qualname__} whose memory cannot be told", _PLAINLY
            ) from (error)
        if begin == 0 and size:
            raise self._violation(field, f"is a {type(tensor).__qualname__} without an address", _PLAINLY)
        what = f"{_true(tensor, 'dtype')} {[*_true(tensor, 'shape')]}"
        self._range(begin, begin + size, first, device, field, what)

    def _array(self, array: np.ndarray[Any, Any], field: str) -> None:
        if array.dtype.hasobject:
            raise self._violation(field, "is an array of objects, which the audit does not look into", _PLAINLY)
        begin, end = _bounds(array)
        self._range(begin, end, begin, torch.device("cpu"), field, f"array of {array.dtype} {[*array.shape]}")

    def _range(self, begin: int, end: int, first: int, device: torch.device, field: str, what: str) -> None:
        region = self._boundary.region_of(begin, end, device) if end > begin else None
        if region is not None:
            where = self._boundary.describe(region, min(max(first, region.begin), region.end - 1))
            raise self._violation(field, f"({what}) lies in {where}", _KEEP)

    def _violation(self, field: str, found: str, remedy: str) -> BoundaryViolation:
        return BoundaryViolation(self._call, field, found, remedy)


_KEEP: Final = "nothing of the workspace goes to a connector: send a tensor of the model's own, or a copy"
_PLAINLY: Final = "send a plain tensor"


def owned_tensors(roots: Mapping[str, object]) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
    """Every tensor that our objects hold, with the path to it.

    Looks into containers and into objects whose class, or a base of it, is this package's; and into the roots.
    """
    return _owned(roots, torch.Tensor)


def _owned(roots: Mapping[str, object], wanted: type[Any]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    seen: dict[int, object] = {}
    todo: deque[tuple[tuple[Any, ...], object, bool]] = deque()
    for name, root in roots.items():
        todo.append(((name,) if name else (), root, True))
    while todo:
        path, value, root = todo.popleft()
        if isinstance(value, wanted):
            yield path, value
        if isinstance(value, (*_PLAIN, torch.Tensor, np.ndarray, type, Trace)) or id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, Mapping):
            todo += [((*path, _Key(key)), part, False) for key, part in value.items()]
        elif isinstance(value, (list, tuple, deque)):
            todo += [((*path, index), part, False) for index, part in enumerate(value)]
        elif root or any(f"{cls.__module__}.".startswith("afd_dsv4.") for cls in type(value).__mro__):
            todo += [((*path, name), part, False) for name, part in _named(value)]


class _Key(NamedTuple):
    """A key of a mapping, in a path."""

    key: object


def _bounds(array: np.ndarray[Any, Any]) -> tuple[int, int]:
    """The addresses of an array's first byte and behind its last; NumPy has this by one name up to 1.26 and another."""
    begin = end = array.ctypes.data
    if array.size:
        reach = [(size - 1) * stride for size, stride in zip(array.shape, array.strides, strict=True)]
        begin += sum(step for step in reach if step < 0)
        end += sum(step for step in reach if step > 0) + array.itemsize
    return begin, end


#: Containers whose subclasses may say anything of what is in them.
_ITERATED: Final[tuple[Any, ...]] = (list, tuple, deque, set, frozenset)


def _items(value: Any) -> list[object]:
    """What is in a container, whatever its class says that is."""
    for cls in _ITERATED:
        if isinstance(value, cls):
            return [*cls.__iter__(value)]
    return [*value]


@functools.cache
def _slots(cls: Any) -> tuple[tuple[str, Any], ...]:
    """Attributes that objects of a class have in places of their own: slots, and members of what is written in C."""
    return tuple(
        (name, each)
        for base in cls.__mro__
        for name, each in vars(base).items()
        if isinstance(each, types.MemberDescriptorType)
    )


def _true(tensor: torch.Tensor, name: str) -> Any:
    """An attribute as torch has it, whatever the tensor's class says that it is."""
    with torch._C.DisableTorchFunctionSubclass():
        return getattr(torch.Tensor, name).__get__(tensor)


#: What gives entries that are not there, and nothing that is not the mapping's: a factory is an attribute of it.
_HARMLESS: Final[tuple[Any, ...]] = (defaultdict.__missing__, Counter.__missing__)
_HEAP_TYPE: Final = 1 << 9  # Py_TPFLAGS_HEAPTYPE: made by a class statement, or as if it were
#: Bases that have nothing of a payload in their classes.
_BARE: Final = frozenset({*torch.Tensor.__mro__, *torch.nn.Parameter.__mro__, enum.Enum, enum.IntEnum, enum.Flag})


def _class_level(cls: Any) -> list[tuple[str, object]]:
    """Attributes of a class and its bases that are values: no code, and nothing that Python keeps there."""
    held: list[tuple[str, object]] = []
    for base in cls.__mro__:
        if base.__flags__ & _HEAP_TYPE and base not in _BARE and base.__module__ not in _STANDARD:
            held += [
                (f"__class__.{name}", each)
                for name, each in vars(base).items()
                if not (name.startswith("__") and name.endswith("__"))
                and name != "_abc_impl"
                and not isinstance(each, (types.ModuleType, types.BuiltinFunctionType))
                and (isinstance(each, type) or not hasattr(type(each), "__get__"))
            ]
    return held


#: Modules of Python's own whose classes hold nothing of a payload.
_STANDARD: Final = frozenset({"abc", "collections", "collections.abc", "dataclasses", "enum", "typing"})


def _attributes(value: object) -> dict[str, object]:
    """What an object has in its `__dict__`, whatever its class says that this is."""
    for base in type(value).__mro__:
        place = vars(base).get("__dict__")
        if isinstance(place, types.GetSetDescriptorType):
            return cast(dict[str, object], place.__get__(value))
    return cast(dict[str, object], getattr(value, "__dict__", {}))


def _named(value: object) -> list[tuple[str, object]]:
    """Attributes of an object, with and without slots."""
    held: list[tuple[str, object]] = []
    cls: Any = type(value)
    for name, place in _slots(cls):
        try:
            held.append((name, place.__get__(value)))
        except AttributeError:  # not set
            continue
    return held + list(_attributes(value).items())


def _apart(regions: list[Region]) -> list[Region]:
    """Regions by address, those of one storage once."""
    found: list[Region] = []
    for region in sorted(regions, key=lambda region: (region.begin, -region.end)):
        if found and region.begin < found[-1].end:
            last = found[-1]
            found[-1] = last._replace(end=max(last.end, region.end))
        else:
            found.append(region)
    return found


def _process_groups() -> tuple[type, ...]:
    """Handles of communication: they have names and ranks."""
    group = getattr(torch.distributed, "ProcessGroup", None)
    return (group,) if isinstance(group, type) else ()


def _key(part: object) -> str:
    part = part.key if isinstance(part, _Key) else part
    return str(part.value) if isinstance(part, enum.Enum) else _words(part)


def _name(value: object) -> str:
    return f"{type(value).__qualname__} of {type(value).__module__}"


def _words(value: object) -> str:
    try:
        words = repr(value)
    except Exception as error:
        words = f"its repr raises {type(error).__name__}"
    return words if len(words) <= 200 else f"{words[:200]}..."
