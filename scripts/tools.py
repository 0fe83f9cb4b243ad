"""The six tools of the sample agent: files of one folder, and a calculator.

Knows a workspace and the text that its tools answer. Knows nothing of models, conversations or the
wire.

Strategy: an answer is a few short lines that name what they are about (`oak/elm.txt: 42`), and
whatever the next step needs is in it: a page says which file comes next, the calculator repeats its
expression. So a small model can work from the latest answers alone. Bad input is an answer too, one
line that begins with `error:`; nothing is raised. Files are reached through two small classes, one
for a real folder and one for memory, and paths are confined before either sees them.
"""

import ast
import json
import operator
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

MAX_READ_BYTES = 4096  # what one read_file answers with at most; a model's context is dear
MAX_WRITE_BYTES = 65536  # what one write_file accepts
MAX_NAMES = 200  # names in one list_files answer
MAX_HITS = 20  # files in one search answer
MAX_SEARCHED_FILES = 2000  # files that one search looks into
MAX_SEARCHED_BYTES = 65536  # bytes of each file that a search looks at
MAX_ECHO_CHARACTERS = 80  # of the caller's own text, in an answer
MAX_EXPRESSION_CHARACTERS = 200
MAX_MAGNITUDE = 10**15  # of any number the calculator meets


class ToolError(Exception):
    """A call that cannot be answered; its text is the answer, after `error: `."""


class Files(Protocol):
    """What a workspace needs of a file system. Paths are relative, with "/", and confined."""

    def is_file(self, path: str) -> bool:
        """Whether a file is there."""

    def is_folder(self, path: str) -> bool:
        """Whether a folder is there; "" is the root."""

    def names(self, folder: str) -> list[str]:
        """Names in a folder in order, folders with a "/" at the end."""

    def read(self, path: str, limit: int) -> tuple[bytes, int]:
        """At most `limit` first bytes of a file, and its size in bytes."""

    def write(self, path: str, content: bytes) -> None:
        """Makes or replaces a file, and the folders above it."""


class MemoryFiles:
    """Files in a dictionary of path and text; a folder is there while a file is in it."""

    def __init__(self, texts: dict[str, str]) -> None:
        self.texts = dict(texts)

    def is_file(self, path: str) -> bool:
        """Whether a file is there."""
        return path in self.texts

    def is_folder(self, path: str) -> bool:
        """Whether a folder is there; "" is the root."""
        return not path or any(name.startswith(path + "/") for name in self.texts)

    def names(self, folder: str) -> list[str]:
        """Names in a folder in order, folders with a "/" at the end."""
        start = folder + "/" if folder else ""
        below = (path[len(start) :] for path in self.texts if path.startswith(start))
        return sorted({head + slash for head, slash, _ in (path.partition("/") for path in below)})

    def read(self, path: str, limit: int) -> tuple[bytes, int]:
        """At most `limit` first bytes of a file, and its size in bytes."""
        content = self.texts[path].encode()
        return content[:limit], len(content)

    def write(self, path: str, content: bytes) -> None:
        """Makes or replaces a file."""
        self.texts[path] = content.decode()


class DiskFiles:
    """Files below a real folder. A path that leaves it through a symbolic link is refused."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve(strict=True)

    def is_file(self, path: str) -> bool:
        """Whether a regular file is there."""
        return self._inside(path).is_file()

    def is_folder(self, path: str) -> bool:
        """Whether a folder is there; "" is the root."""
        return self._inside(path).is_dir()

    def names(self, folder: str) -> list[str]:
        """Names in a folder in order, folders with a "/" at the end; links that lead out are left out."""
        with os.scandir(self._inside(folder)) as entries:
            inside = [
                entry for entry in entries if not entry.is_symlink() or self._stays_inside(Path(entry.path))
            ]
            return sorted(entry.name + ("/" if entry.is_dir() else "") for entry in inside)

    def read(self, path: str, limit: int) -> tuple[bytes, int]:
        """At most `limit` first bytes of a file, and its size in bytes."""
        with self._inside(path).open("rb") as file:
            return file.read(limit), os.fstat(file.fileno()).st_size

    def write(self, path: str, content: bytes) -> None:
        """Makes or replaces a file, and the folders above it."""
        target = self._inside(path)
        if target.exists() and not target.is_file():
            raise ToolError(f"{path}: is no plain file")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)

    def _stays_inside(self, path: Path) -> bool:
        try:
            return path.resolve().is_relative_to(self.root)
        except (OSError, RuntimeError):  # a loop of links
            return False

    def _inside(self, path: str) -> Path:
        target = self.root / path
        if not self._stays_inside(target):
            raise ToolError(f"{path}: outside of the workspace")
        return target.resolve()


class Workspace:
    """A folder, and the tools that work in it."""

    def __init__(self, root: Path | Files) -> None:
        """`root` is a real folder, which must exist, or an object that holds files."""
        self.files: Files = DiskFiles(root) if isinstance(root, Path) else root

    @classmethod
    def in_memory(cls, texts: dict[str, str]) -> "Workspace":
        """A workspace over a copy of {path: text}."""
        return cls(MemoryFiles(texts))

    def call(self, name: str, arguments_json: str) -> str:
        """What tool `name` answers to its arguments, a JSON object; to bad input `error: ...`."""
        try:
            return self._tool(name)(**_arguments(name, arguments_json))
        except ToolError as error:
            return f"error: {error}"
        except OSError as error:
            return f"error: {error.strerror or 'the file system refused'}"

    def _tool(self, name: str) -> Callable[..., str]:
        if name not in PARAMETERS:
            raise ToolError(f"{_echo(name)}: no such tool")
        tool: Callable[..., str] = getattr(self, name)
        return tool

    def list_files(self, folder: str) -> str:
        """`oak:`, a line for each name, `end`."""
        folder = _confined(folder)
        if not self.files.is_folder(folder):
            raise ToolError(f"{folder}: no such folder")
        names = self.files.names(folder)
        rest = [f"and {len(names) - MAX_NAMES} more"] if len(names) > MAX_NAMES else []
        return "\n".join([f"{folder or '.'}:", *names[:MAX_NAMES], *rest, "end"])

    def read_file(self, path: str) -> str:
        """`oak/elm.txt: 42`, or lines below the name; then the next file of the folder, `next: ...`."""
        path, content, size = self._read(path, MAX_READ_BYTES)
        text = _text(path, content, cut=size > len(content)).rstrip("\n")
        if size > len(content):
            text += f"\n(cut: {size - len(content)} more bytes)"
        gap = "\n" if "\n" in text else " "
        return f"{path}:{gap}{text or '(empty)'}\nnext: {self._after(path)}"

    def search(self, text: str) -> str:
        """`moss:`, a line for each file with the text in its name or content, `end`."""
        if not text.strip():
            raise ToolError("text is empty")
        hits: list[str] = []
        for looked_at, path in enumerate(self._walk("")):
            if looked_at >= MAX_SEARCHED_FILES or len(hits) >= MAX_HITS:
                hits.append("and perhaps more")
                break
            content, _ = self.files.read(path, MAX_SEARCHED_BYTES)
            if text.lower() in path.lower() or text.lower() in content.decode(errors="replace").lower():
                hits.append(path)
        return "\n".join([f"{_echo(text)}:", *hits, "end"])

    def count(self, path: str) -> str:
        """`oak: 5 files` or `oak/elm.txt: 3 lines`."""
        path = _confined(path)
        if self.files.is_folder(path):
            files = sum(not name.endswith("/") for name in self.files.names(path))
            return f"{path or '.'}: {files} file{'s' * (files != 1)}"
        path, content, size = self._read(path, MAX_SEARCHED_BYTES)
        lines = len(_text(path, content, cut=size > len(content)).splitlines())
        return f"{path}: {'over ' * (size > len(content))}{lines} line{'s' * (lines != 1)}"

    def write_file(self, path: str, text: str) -> str:
        """`wrote oak/sum.txt: 123`."""
        path = _confined(path)
        content = text.encode(errors="replace")
        if len(content) > MAX_WRITE_BYTES:
            raise ToolError(f"{path}: more than {MAX_WRITE_BYTES} bytes of text")
        if self.files.is_folder(path):
            raise ToolError(f"{path or '.'}: is a folder")
        self.files.write(path, content)
        return f"wrote {path}: {_echo(text)}"

    def calculate(self, expression: str) -> str:
        """`17 + 25 = 42`; knows + - * max(...) min(...) and brackets, over whole and decimal numbers."""
        return f"{expression.strip()} = {_evaluate(expression)}"

    def _read(self, path: str, limit: int) -> tuple[str, bytes, int]:
        path = _confined(path)
        if self.files.is_folder(path):
            raise ToolError(f"{path or '.'}: is a folder")
        if not self.files.is_file(path):
            raise ToolError(f"{path}: no such file")
        return path, *self.files.read(path, limit)

    def _after(self, path: str) -> str:
        folder, slash, name = path.rpartition("/")
        later = (other for other in self.files.names(folder) if other > name and not other.endswith("/"))
        return next((folder + slash + other for other in later), "none")

    def _walk(self, folder: str) -> list[str]:
        found: list[str] = []
        waiting = [folder]
        while waiting and len(found) <= MAX_SEARCHED_FILES:
            folder = waiting.pop()
            start = folder + "/" if folder else ""
            names = [start + name for name in self.files.names(folder)]
            found += [name for name in names if self.files.is_file(name)]
            waiting += [name[:-1] for name in reversed(names) if name.endswith("/")]
        return found


def _function(name: str, description: str, **parameters: str) -> dict[str, Any]:
    return {
        "type": "function",
        "name": name,
        "description": description,
        "parameters": {
            "type": "object",
            "properties": {parameter: {"type": kind} for parameter, kind in parameters.items()},
            "required": list(parameters),
            "additionalProperties": False,
        },
        "strict": False,
    }


TOOLS = (
    _function("list_files", "list a folder", folder="string"),
    _function("read_file", "read a file", path="string"),
    _function("search", "find files with a text", text="string"),
    _function("count", "count files or lines", path="string"),
    _function("write_file", "write a file", path="string", text="string"),
    _function("calculate", "+ - * max() min()", expression="string"),
)
"""The tools as function definitions of the Responses API."""

PARAMETERS: dict[str, list[str]] = {tool["name"]: tool["parameters"]["required"] for tool in TOOLS}


def _arguments(name: str, arguments_json: str) -> dict[str, str]:
    try:
        arguments = json.loads(arguments_json)
    except (ValueError, RecursionError):
        raise ToolError("arguments are not JSON") from None
    wanted = PARAMETERS.get(name, [])
    if not isinstance(arguments, dict):
        raise ToolError("arguments are not an object")
    for parameter in wanted:
        if not isinstance(arguments.get(parameter), str):
            raise ToolError(f"{parameter} is missing or no string")
    for parameter in arguments:
        if name in PARAMETERS and parameter not in wanted:
            raise ToolError(f"{_echo(parameter)}: no such parameter")
    return arguments


def _confined(path: str) -> str:
    """The path without "." parts and slashes at its end, or ToolError if it could leave the workspace."""
    shown = _echo(path)
    if path.startswith("/") or "\\" in path:
        raise ToolError(f"{shown}: paths are relative, with /")
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise ToolError(f"{shown}: outside of the workspace")
    if any(ord(character) < 32 or 0xD800 <= ord(character) < 0xE000 for character in path):
        raise ToolError(f"{shown}: not a path")
    return "/".join(parts)


def _echo(text: str) -> str:
    """The caller's own text, short and in one line."""
    line = " ".join(text.encode(errors="replace").decode().split())
    return line if len(line) <= MAX_ECHO_CHARACTERS else line[:MAX_ECHO_CHARACTERS] + "..."


def _text(path: str, content: bytes, cut: bool) -> str:
    """The content as text; a character cut in two at the end is dropped."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        if cut and error.start >= len(content) - 3:
            return content[: error.start].decode()
        raise ToolError(f"{path}: not text") from None


Number = int | float

OPERATORS: dict[type[ast.AST], Callable[[Any, Any], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}
FUNCTIONS: dict[str, Callable[[list[Number]], Number]] = {"max": max, "min": min}


def _evaluate(expression: str) -> Number:
    shown = _echo(expression)
    if len(expression) > MAX_EXPRESSION_CHARACTERS:
        raise ToolError(f"{shown}: longer than {MAX_EXPRESSION_CHARACTERS} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
        return _value(tree.body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ToolError(f"{shown}: not an expression of + - * max() min()") from None


def _value(node: ast.expr) -> Number:
    """The value of an expression tree; ValueError for anything but numbers, + - *, max and min."""
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            result: Number = value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            result = -_value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            result = OPERATORS[type(op)](_value(left), _value(right))
        case ast.Call(func=ast.Name(id=name), args=[_, *_] as arguments, keywords=[]) if name in FUNCTIONS:
            result = FUNCTIONS[name]([_value(argument) for argument in arguments])
        case _:
            raise ValueError("not arithmetic")
    if not abs(result) <= MAX_MAGNITUDE:
        raise ToolError(f"a number beyond {MAX_MAGNITUDE}")
    return result
