# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Reads what a symbol of vLLM or vllm-ascend looks like from source text. Nothing of them is imported or run.

Problem: a version number does not say whether the code on disk is the code that an adapter was written against, and
asking the imported object comes too late: by then vllm-ascend has replaced parts of vLLM.
Way: the standard library's `ast`. A symbol becomes an *entry*, plain JSON that holds what an adapter can depend on:
parameters, defaults, decorators and a hash of the body of a function; bases and fields of a class; the value of a
constant; where an imported name comes from; which class an inherited member comes from; the schema of an operator.
Comments, docstrings and layout leave no trace in it, nor does the Python version that reads.
Not here: names that only running the code makes (`import *`, `setattr`); `explain.py` looks for those with griffe.

Targets: `package.module:Class.member`, any depth, a function's locals and an instance's `self.` attributes included;
`namespace::operator` for an operator of torch.
"""

from __future__ import annotations

import ast
import hashlib
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

Entry: TypeAlias = dict[str, Any]
_Function: TypeAlias = "ast.FunctionDef | ast.AsyncFunctionDef"

_HASH_DIGITS: Final = 16
_UNSEEN: Final = frozenset({"ctx", "kind", "type_comment", "type_ignores"})  # they say nothing that a program does
_OPERATOR_PACKAGE: Final = {"_C_ascend": "vllm_ascend"}


class NotFound(LookupError):
    """The symbol is not where its target says."""


class NotReadable(LookupError):
    """Nothing at hand says what the symbol is, which does not mean that it is absent."""


@dataclass(frozen=True)
class Found:
    """A symbol as read.

    Attributes:
        entry: what it is, with the files it was read from under `files`.
        place: file and line of its definition.
    """

    entry: Entry
    place: str


@dataclass(frozen=True)
class _Scope:
    """A place that names are looked up in: a module, a class or a function."""

    module: str
    path: str
    body: Sequence[ast.stmt]
    qualname: str = ""


@dataclass(frozen=True)
class _Definition:
    """All statements that bind one name in one scope; the last one counts."""

    scope: _Scope
    name: str
    nodes: tuple[ast.stmt, ...]

    @property
    def last(self) -> ast.stmt:
        return self.nodes[-1]

    def inside(self) -> _Scope | None:
        """The scope that it opens, None for a value."""
        last = self.last
        if isinstance(last, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            qualname = f"{self.scope.qualname}.{self.name}".lstrip(".")
            return _Scope(self.scope.module, self.scope.path, last.body, qualname)
        return None


class Reader:
    """Reads symbols from the folders of the given packages.

    Args:
        packages: folder of each top-level package, by its import name.
    """

    def __init__(self, packages: Mapping[str, Path]) -> None:
        self.packages = dict(packages)
        self._modules: dict[str, _Scope | None] = {}
        self._names: dict[int, dict[str, list[ast.stmt]]] = {}

    def read(self, target: str) -> Found:
        """Read one symbol.

        Raises:
            NotFound: its module, or the symbol in it, does not exist.
            NotReadable: its package is not among the given ones, or holds no text that says what it is.
        """
        if "::" in target:
            return self._operator(target)
        module, _, qualname = target.partition(":")
        package = module.partition(".")[0]
        if package not in self.packages:
            raise NotReadable(f"{package} was not given")
        files: list[str] = []
        parts = qualname.split(".")
        inherited = False
        found = self._in_module(module, parts[0], files)
        if found is None:
            raise NotFound(f"no module {module}" if self._module(module) is None else f"no {parts[0]} in {module}")
        for depth, part in enumerate(parts[1:], 1):
            owner = self._behind_imports(found, files)
            member = self._member(owner, part, files) if owner else None
            if member is None:
                raise NotFound(f"no {part} in {module}:{'.'.join(parts[:depth])}")
            inherited = owner is not None and owner.inside() != member.scope
            found = member
        entry = self._entry(found) | {"files": list(dict.fromkeys(files))}
        if inherited:
            entry["inherited_from"] = f"{found.scope.module}:{found.scope.qualname}"
        return Found(entry, f"{found.scope.path}:{found.last.lineno}")

    def folder_of(self, file: str) -> Path | None:
        """The path of a file that an entry names, None where its package was not given."""
        package, _, rest = file.partition("/")
        if package == "csrc":  # beside the package, in a checkout
            folder = self.packages.get("vllm_ascend")
            return folder.parent / file if folder else None
        folder = self.packages.get(package)
        return folder / rest if folder else None

    # --- looking up -------------------------------------------------------------------------------------------------

    def _module(self, name: str) -> _Scope | None:
        if name not in self._modules:
            self._modules[name] = self._parse(name)
        return self._modules[name]

    def _parse(self, name: str) -> _Scope | None:
        package, *rest = name.split(".")
        folder = self.packages.get(package)
        if folder is None:
            return None
        stem = folder.joinpath(*rest)
        for path in (stem / "__init__.py", stem.with_name(stem.name + ".py")):
            if path.is_file() and (rest or path.name == "__init__.py"):
                shown = "/".join((package, path.relative_to(folder).as_posix()))
                try:
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")  # an invalid escape in their text is not ours to report
                        tree = ast.parse(path.read_bytes())
                except (SyntaxError, ValueError) as error:
                    raise NotReadable(f"{shown} does not parse: {error}") from None
                return _Scope(name, shown, tree.body)
        return None

    def _bound(self, scope: _Scope, name: str) -> _Definition | None:
        names = self._names.get(id(scope.body))
        if names is None:
            names = self._names[id(scope.body)] = {}
            for bound, node in _bindings(scope.body):
                names.setdefault(bound, []).append(node)
        nodes = names.get(name)
        return _Definition(scope, name, tuple(nodes)) if nodes else None

    def _in_module(self, module: str, name: str, files: list[str]) -> _Definition | None:
        scope = self._module(module)
        if scope is None:
            return None
        files.append(scope.path)
        return self._bound(scope, name)

    def _behind_imports(self, found: _Definition, files: list[str], depth: int = 0) -> _Definition | None:
        """The definition that an imported name stands for, itself where it is none."""
        source = _import_source(found.scope, found.last, found.name, self._is_package(found.scope))
        if source is None:
            return found
        module, name = source
        if name is None or depth > 20:  # a module, or imports that go round in a circle
            return None
        further = self._in_module(module, name, files)
        return self._behind_imports(further, files, depth + 1) if further else None

    def _member(self, owner: _Definition, name: str, files: list[str]) -> _Definition | None:
        inside = owner.inside()
        if inside is None:
            return None
        found = self._bound(inside, name)
        if found is not None or not isinstance(owner.last, ast.ClassDef):
            return found
        assigned = _assigned_on_self(owner.last, name)
        if assigned:
            return _Definition(inside, name, assigned)
        for base in owner.last.bases:
            parent = self._base(owner.scope, base, files)
            further = self._member(parent, name, files) if parent else None
            if further is not None:
                return further
        return None

    def _base(self, scope: _Scope, base: ast.expr, files: list[str]) -> _Definition | None:
        if isinstance(base, ast.Subscript):  # a generic
            base = base.value
        if isinstance(base, ast.Name):
            found = self._in_module(scope.module, base.id, files)
            return self._behind_imports(found, files) if found else None
        if isinstance(base, ast.Attribute) and isinstance(base.value, ast.Name):
            holder = self._in_module(scope.module, base.value.id, files)
            source = _import_source(scope, holder.last, holder.name, self._is_package(scope)) if holder else None
            if source:
                module = ".".join(part for part in source if part)
                found = self._in_module(module, base.attr, files)
                return self._behind_imports(found, files) if found else None
        return None

    def _is_package(self, scope: _Scope) -> bool:
        return scope.path.endswith("/__init__.py")

    # --- entries ----------------------------------------------------------------------------------------------------

    def _entry(self, found: _Definition) -> Entry:
        last = found.last
        if isinstance(last, (ast.FunctionDef, ast.AsyncFunctionDef)):
            same = [node for node in found.nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
            return _function(last, same)
        if isinstance(last, ast.ClassDef):
            return _class(last)
        source = _import_source(found.scope, last, found.name, self._is_package(found.scope))
        if source is not None:
            return {"kind": "import", "from": ":".join(part for part in source if part)}
        on_self = not isinstance(last, (ast.Assign, ast.AnnAssign, ast.AugAssign)) or not _binds(last, found.name)
        values = [_text(node.value) for node in found.nodes if isinstance(node, (ast.Assign, ast.AnnAssign))]
        values += [f"(augmented) {_text(node)}" for node in found.nodes if isinstance(node, ast.AugAssign)]
        return {"kind": "attribute" if on_self else "constant", "values": [_short(value) for value in values]}

    # --- operators --------------------------------------------------------------------------------------------------

    def _operator(self, target: str) -> Found:
        """From the C++ that registers it, or from the text of the schema in the compiled library."""
        namespace, _, name = target.partition("::")
        package = _OPERATOR_PACKAGE.get(namespace)
        folder = self.packages.get(package) if package else None
        if package is None or folder is None:
            raise NotReadable(f"no sources of the namespace {namespace} were given")
        sources = sorted(folder.parent.glob("csrc/torch_binding*.cpp"))
        libraries = sorted(folder.glob(f"{package}_C*.so"))
        for path in sources:
            schema = _schema_in_cpp(path.read_text(encoding="utf-8", errors="replace"), name)
            if schema:
                file = f"csrc/{path.name}"
                return Found({"kind": "operator", "schema": schema, "files": [file]}, file)
        if sources:
            raise NotFound(f"no operator {name} in {', '.join(path.name for path in sources)}")
        for path in libraries:
            schema = _schema_in_library(path.read_bytes(), name)
            if schema:
                file = f"{package}/{path.name}"
                return Found({"kind": "operator", "schema": schema, "files": [file]}, file)
        if libraries:
            raise NotFound(f"no operator {name} in {', '.join(path.name for path in libraries)}")
        raise NotReadable(f"{target} is not readable statically: neither csrc/ nor a compiled library is there")


def digest(nodes: Iterable[ast.AST]) -> str:
    """A hash of what code does: the same for any layout, comment and docstring, and in any Python version."""
    return hashlib.sha256("\n".join(map(_canonical, nodes)).encode()).hexdigest()[:_HASH_DIGITS]


def _canonical(node: Any) -> str:
    if isinstance(node, ast.Constant):
        return f"{type(node.value).__name__}:{node.value!r}"
    if isinstance(node, ast.AST):
        parts = []
        for field, value in ast.iter_fields(node):
            if field == "body" and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                value = _without_docstring(value)
            if field in _UNSEEN or value is None or value == []:  # an empty field may be new in a later Python
                continue
            parts.append(f"{field}={_canonical(value)}")
        return f"{type(node).__name__}({','.join(parts)})"
    if isinstance(node, list):
        return f"[{','.join(map(_canonical, node))}]"
    return repr(node)


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[0] if body else None
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        return body[1:] or [ast.Pass()]
    return body


def _function(last: _Function, same: Sequence[_Function]) -> Entry:
    entry: Entry = {
        "kind": "function",
        "async": isinstance(last, ast.AsyncFunctionDef),
        "decorators": [_text(decorator) for decorator in last.decorator_list],
        "parameters": [list(parameter) for parameter in _parameters(last.args)],
        "returns": _text(last.returns),
        "body": digest(_without_docstring(last.body)),
    }
    if len(same) > 1:  # overloads, a property and its setter, one per version
        entry["others"] = digest(same[:-1])
    return entry


def _parameters(arguments: ast.arguments) -> Iterator[tuple[str, str, str | None, str | None]]:
    """Name, kind, default and annotation of each parameter, in order."""
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + [_text(value) for value in arguments.defaults]
    for index, (argument, default) in enumerate(zip(positional, defaults, strict=True)):
        kind = "positional-only" if index < len(arguments.posonlyargs) else "positional"
        yield argument.arg, kind, default, _text(argument.annotation)
    if arguments.vararg:
        yield arguments.vararg.arg, "*", None, _text(arguments.vararg.annotation)
    for argument, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield argument.arg, "keyword-only", _text(value), _text(argument.annotation)
    if arguments.kwarg:
        yield arguments.kwarg.arg, "**", None, _text(arguments.kwarg.annotation)


def _class(node: ast.ClassDef) -> Entry:
    fields: dict[str, list[str | None]] = {}
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            fields[statement.target.id] = [_text(statement.annotation), _short(_text(statement.value))]
        elif isinstance(statement, ast.Assign):
            for target in statement.targets:
                if isinstance(target, ast.Name):
                    fields[target.id] = [None, _short(_text(statement.value))]
    return {
        "kind": "class",
        "decorators": [_text(decorator) for decorator in node.decorator_list],
        "bases": [_text(base) for base in node.bases] + [f"{word.arg}={_text(word.value)}" for word in node.keywords],
        "fields": [[name, *said] for name, said in fields.items()],
    }


def _bindings(body: Sequence[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """Every name that these statements bind, inside `if`, `try`, `with` and loops too."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name, node
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                yield alias.asname or alias.name.partition(".")[0], node
        elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                for part in ast.walk(target):
                    if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                        yield part.id, node
        else:
            for field in ("body", "orelse", "finalbody"):
                yield from _bindings(getattr(node, field, []))
            for handler in getattr(node, "handlers", []):
                yield from _bindings(handler.body)


def _binds(node: ast.stmt, name: str) -> bool:
    return any(bound == name for bound, _ in _bindings([node]))


def _assigned_on_self(node: ast.ClassDef, name: str) -> tuple[ast.stmt, ...]:
    """Every `self.name = ...` in the methods of a class, in order."""
    found = []
    for statement in ast.walk(node):
        if isinstance(statement, (ast.Assign, ast.AnnAssign)):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            for part in (part for target in targets for part in ast.walk(target)):
                if (
                    isinstance(part, ast.Attribute)
                    and part.attr == name
                    and isinstance(part.ctx, ast.Store)
                    and isinstance(part.value, ast.Name)
                    and part.value.id == "self"
                ):
                    found.append(statement)
                    break
    return tuple(sorted(found, key=lambda statement: statement.lineno))


def _import_source(scope: _Scope, node: ast.stmt, name: str, is_package: bool) -> tuple[str, str | None] | None:
    """Module and name that an import statement binds a name to; the name is None where it is a module."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            if alias.asname == name:
                return alias.name, None
            if alias.asname is None and alias.name.partition(".")[0] == name:
                return name, None
    if isinstance(node, ast.ImportFrom):
        module = node.module or ""
        if node.level:
            parents = scope.module.split(".")
            parents = parents[: len(parents) - node.level + (1 if is_package else 0)]
            module = ".".join([*parents, *([module] if module else [])])
        for alias in node.names:
            if (alias.asname or alias.name) == name:
                return module, alias.name
    return None


def _text(node: ast.AST | None) -> str | None:
    return None if node is None else ast.unparse(node)


def _short(text: str | None, most: int = 2000) -> str | None:
    if text is None or len(text) <= most:
        return text
    return f"{text[:60]}... ({len(text)} characters, {hashlib.sha256(text.encode()).hexdigest()[:_HASH_DIGITS]})"


def _schema_in_cpp(text: str, name: str) -> str | None:
    """The string literals, which C++ joins, in the `def(` that registers the operator."""
    text = re.sub(r"^\s*//.*$", "", text, flags=re.MULTILINE)
    start = re.search(rf'\bdef\(\s*"{re.escape(name)}\(', text)
    if start is None:
        return None
    literals = re.match(r'\s*(?:"(?:[^"\\]|\\.)*"\s*)+', text[text.index('"', start.start()) :])
    assert literals is not None
    joined = "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', literals[0]))
    return _one_space(joined.replace('\\"', '"'))


def _schema_in_library(content: bytes, name: str) -> str | None:
    found = re.search(rb"\x00(" + re.escape(name.encode()) + rb"\([^\x00]*->[^\x00]*)\x00", content)
    return _one_space(found[1].decode("utf-8", "replace")) if found else None


def _one_space(schema: str) -> str:
    """One layout for every way to write a schema; torch does not care about the blanks either."""
    schema = " ".join(schema.split())
    for pattern, wanted in (
        (r"\(\s+", "("),
        (r"\s+\)", ")"),
        (r"\s*,\s*", ", "),
        (r"\s*=\s*", "="),
        (r"\s*->\s*", " -> "),
    ):
        schema = re.sub(pattern, wanted, schema)
    return schema
