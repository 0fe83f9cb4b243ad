"""The sample agent's tools: what they answer, what they refuse, and that nothing leaves the workspace."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.tools import (
    MAX_HITS,
    MAX_NAMES,
    MAX_READ_BYTES,
    MAX_WRITE_BYTES,
    PARAMETERS,
    TOOLS,
    DiskFiles,
    MemoryFiles,
    Workspace,
)

FILES = {
    "garden/fern.txt": "42",
    "garden/moss.txt": "see harbor/tide.md",
    "garden/deep/root.txt": "7",
    "harbor/tide.md": "amber\nlantern\nquill\n",
    "note.txt": "",
}


@pytest.fixture(params=["memory", "disk"])
def workspace(request: pytest.FixtureRequest, tmp_path: Path) -> Workspace:
    if request.param == "memory":
        return Workspace.in_memory(FILES)
    for path, text in FILES.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return Workspace(tmp_path)


def call(workspace: Workspace, tool: str, **arguments: object) -> str:
    return workspace.call(tool, json.dumps(arguments))


ANSWERS = [
    ("list_files", {"folder": "garden"}, "garden:\ndeep/\nfern.txt\nmoss.txt\nend"),
    ("list_files", {"folder": "garden/"}, "garden:\ndeep/\nfern.txt\nmoss.txt\nend"),
    ("list_files", {"folder": "."}, ".:\ngarden/\nharbor/\nnote.txt\nend"),
    ("list_files", {"folder": ""}, ".:\ngarden/\nharbor/\nnote.txt\nend"),
    ("list_files", {"folder": "desert"}, "error: desert: no such folder"),
    ("read_file", {"path": "garden/fern.txt"}, "garden/fern.txt: 42\nnext: garden/moss.txt"),
    ("read_file", {"path": "./garden//moss.txt"}, "garden/moss.txt: see harbor/tide.md\nnext: none"),
    ("read_file", {"path": "harbor/tide.md"}, "harbor/tide.md:\namber\nlantern\nquill\nnext: none"),
    ("read_file", {"path": "note.txt"}, "note.txt: (empty)\nnext: none"),
    ("read_file", {"path": "garden/elm.txt"}, "error: garden/elm.txt: no such file"),
    ("read_file", {"path": "garden"}, "error: garden: is a folder"),
    ("search", {"text": "LANTERN"}, "LANTERN:\nharbor/tide.md\nend"),
    ("search", {"text": "tide"}, "tide:\ngarden/moss.txt\nharbor/tide.md\nend"),
    ("search", {"text": "zebra"}, "zebra:\nend"),
    ("search", {"text": " "}, "error: text is empty"),
    ("count", {"path": "garden"}, "garden: 2 files"),
    ("count", {"path": "harbor"}, "harbor: 1 file"),
    ("count", {"path": "harbor/tide.md"}, "harbor/tide.md: 3 lines"),
    ("count", {"path": "garden/fern.txt"}, "garden/fern.txt: 1 line"),
    ("count", {"path": "elm"}, "error: elm: no such file"),
    ("write_file", {"path": "new/sum.txt", "text": "123"}, "wrote new/sum.txt: 123"),
    ("write_file", {"path": "garden", "text": "1"}, "error: garden: is a folder"),
    ("write_file", {"path": "", "text": "1"}, "error: .: is a folder"),
    ("calculate", {"expression": "17 + 25"}, "17 + 25 = 42"),
    ("calculate", {"expression": " (2 + 3) * -4 "}, "(2 + 3) * -4 = -20"),
    ("calculate", {"expression": "max(3, 8, 5) - min(2, 1)"}, "max(3, 8, 5) - min(2, 1) = 7"),
    ("calculate", {"expression": "0.5 * 3"}, "0.5 * 3 = 1.5"),
]


@pytest.mark.parametrize(("tool", "arguments", "answer"), ANSWERS)
def test_a_tool_answers_in_a_few_lines(workspace, tool, arguments, answer):
    assert call(workspace, tool, **arguments) == answer


ERRORS = [
    ("fly", "{}", "fly: no such tool"),
    ("_tool", '{"name": "x"}', "_tool: no such tool"),
    ("read_file", "{", "arguments are not JSON"),
    ("read_file", "[" * 100_000, "arguments are not JSON"),
    ("read_file", '["garden"]', "arguments are not an object"),
    ("read_file", "{}", "path is missing or no string"),
    ("read_file", '{"path": 3}', "path is missing or no string"),
    ("read_file", '{"path": "a", "mode": "w"}', "mode: no such parameter"),
    ("read_file", '{"path": "/etc/passwd"}', "/etc/passwd: paths are relative, with /"),
    ("read_file", '{"path": "a\\\\b"}', "a\\b: paths are relative, with /"),
    ("read_file", '{"path": "garden/../../x"}', "garden/../../x: outside of the workspace"),
    ("list_files", '{"folder": ".."}', "..: outside of the workspace"),
    ("count", '{"path": "../x"}', "../x: outside of the workspace"),
    ("write_file", '{"path": "../x", "text": ""}', "../x: outside of the workspace"),
    ("read_file", '{"path": "a\\u0000b"}', "a\x00b: not a path"),
    ("read_file", '{"path": "\\ud800"}', "?: not a path"),
]


@pytest.mark.parametrize(("tool", "arguments", "error"), ERRORS)
def test_bad_calls_are_answered_with_an_error(workspace, tool, arguments, error):
    assert workspace.call(tool, arguments) == f"error: {error}"


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "2 **",
        "2 ** 3",
        "1 / 2",
        "f(1)",
        "max()",
        "max(*[1])",
        "max(1, key=2)",
        "().x",
        "'a' * 3",
        "True + 1",
        "2j",
    ],
)
def test_what_is_no_arithmetic_is_refused(workspace, expression):
    answer = call(workspace, "calculate", expression=expression)
    assert answer == f"error: {expression}: not an expression of + - * max() min()"


def test_arithmetic_is_bounded(workspace):
    for expression in ("1e300 * 1e300", "1e999", "1e999 - 1e999", "*".join(["99999"] * 30)):
        assert call(workspace, "calculate", expression=expression).startswith("error: a number beyond")
    assert "longer than" in call(workspace, "calculate", expression="1 + " * 60 + "1")
    assert call(workspace, "calculate", expression="(" * 190).startswith("error: ")


@given(st.integers(-(10**6), 10**6), st.sampled_from("+-*"), st.integers(0, 10**6))
def test_the_calculator_agrees_with_python(left, sign, right):
    wanted = {"+": left + right, "-": left - right, "*": left * right}[sign]
    answer = call(Workspace.in_memory({}), "calculate", expression=f"{left} {sign} {right}")
    assert answer == f"{left} {sign} {right} = {wanted}"


@given(st.text(), st.text())
def test_no_call_raises(tool, arguments):
    workspace = Workspace.in_memory(FILES)
    assert workspace.call(tool, arguments).startswith("error: ")
    for name, parameters in PARAMETERS.items():
        assert isinstance(workspace.call(name, json.dumps(dict.fromkeys(parameters, arguments))), str)


def test_a_written_file_can_be_read(workspace):
    call(workspace, "write_file", path="new/deep/sum.txt", text="grüße\n2")
    assert call(workspace, "read_file", path="new/deep/sum.txt") == "new/deep/sum.txt:\ngrüße\n2\nnext: none"


def test_writing_is_bounded(workspace):
    answer = call(workspace, "write_file", path="big.txt", text="x" * (MAX_WRITE_BYTES + 1))
    assert answer == f"error: big.txt: more than {MAX_WRITE_BYTES} bytes of text"
    assert call(workspace, "read_file", path="big.txt") == "error: big.txt: no such file"


def test_a_long_file_is_cut_with_a_note(tmp_path):
    (tmp_path / "long.txt").write_text("é" * MAX_READ_BYTES)
    (tmp_path / "odd.txt").write_text("x" + "é" * MAX_READ_BYTES)
    for name in ("long.txt", "odd.txt"):
        answer = call(Workspace(tmp_path), "read_file", path=name)
        assert f"(cut: {(tmp_path / name).stat().st_size - MAX_READ_BYTES} more bytes)" in answer
        assert len(answer.encode()) < MAX_READ_BYTES + 100


def test_long_lists_are_cut_with_a_note():
    workspace = Workspace.in_memory({f"f{i:04}.txt": "x" for i in range(MAX_NAMES + 5)})
    listing = call(workspace, "list_files", folder=".").split("\n")
    assert len(listing) == MAX_NAMES + 3
    assert listing[-2:] == ["and 5 more", "end"]
    hits = call(workspace, "search", text="x").split("\n")
    assert len(hits) == MAX_HITS + 3
    assert hits[-2] == "and perhaps more"


def test_a_binary_file_is_no_text(tmp_path):
    (tmp_path / "photo.txt").write_bytes(b"\xff\xfe\x00\x01")
    workspace = Workspace(tmp_path)
    assert call(workspace, "read_file", path="photo.txt") == "error: photo.txt: not text"
    assert call(workspace, "count", path="photo.txt") == "error: photo.txt: not text"
    assert call(workspace, "search", text="photo") == "photo:\nphoto.txt\nend"


def test_links_that_lead_out_are_refused(tmp_path):
    outside, root = tmp_path / "outside", tmp_path / "root"
    outside.mkdir()
    root.mkdir()
    (outside / "secret.txt").write_text("secret")
    (root / "plain.txt").write_text("5")
    (root / "to_file.txt").symlink_to(outside / "secret.txt")
    (root / "to_folder").symlink_to(outside)
    (root / "loop").symlink_to(root / "loop")
    (root / "inside.txt").symlink_to(root / "plain.txt")
    workspace = Workspace(root)
    for tool, arguments in [
        ("read_file", {"path": "to_file.txt"}),
        ("read_file", {"path": "to_folder/secret.txt"}),
        ("list_files", {"folder": "to_folder"}),
        ("count", {"path": "to_file.txt"}),
        ("write_file", {"path": "to_file.txt", "text": "x"}),
        ("write_file", {"path": "to_folder/new.txt", "text": "x"}),
        ("read_file", {"path": "loop"}),
        ("write_file", {"path": "loop/x", "text": "x"}),
    ]:
        assert "outside of the workspace" in call(workspace, tool, **arguments)
    assert (outside / "secret.txt").read_text() == "secret"
    assert list(outside.iterdir()) == [outside / "secret.txt"]
    assert call(workspace, "list_files", folder=".") == ".:\ninside.txt\nplain.txt\nend"
    assert call(workspace, "search", text="secret") == "secret:\nend"
    assert call(workspace, "read_file", path="inside.txt") == "inside.txt: 5\nnext: plain.txt"


def test_a_pipe_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    workspace = Workspace(tmp_path)
    assert call(workspace, "read_file", path="pipe") == "error: pipe: no such file"
    assert call(workspace, "write_file", path="pipe", text="x") == "error: pipe: is no plain file"
    assert call(workspace, "search", text="pipe") == "pipe:\nend"


def test_reading_every_page_by_its_footer_sees_every_file_once(workspace):
    path, seen = "garden/fern.txt", []
    while path != "none":
        seen.append(path)
        path = call(workspace, "read_file", path=path).rpartition("next: ")[2]
    assert seen == ["garden/fern.txt", "garden/moss.txt"]


def test_the_root_has_to_be_there(tmp_path):
    with pytest.raises(FileNotFoundError):
        Workspace(tmp_path / "nowhere")


def test_definitions_name_the_tools_and_all_their_parameters():
    for tool in TOOLS:
        assert callable(getattr(Workspace, tool["name"]))
        assert tool["parameters"]["required"] == list(tool["parameters"]["properties"])
        assert tool["parameters"]["additionalProperties"] is False


@given(
    st.dictionaries(
        st.sampled_from(["a/b.txt", "a/c.txt", "a/d/e.txt", "f.txt", "g/h.md"]), st.text("xy\n1", max_size=9)
    ),
    st.sampled_from(["", "a", "a/d", "g", "f.txt", "a/c.txt"]),
)
def test_memory_and_disk_agree(tmp_path_factory, texts, path):
    root = tmp_path_factory.mktemp("root")
    disk = DiskFiles(root)
    memory = MemoryFiles({})
    for name, text in texts.items():
        disk.write(name, text.encode())
        memory.write(name, text.encode())
    for name, parameters in PARAMETERS.items():
        arguments = json.dumps(dict.fromkeys(parameters, path))
        assert Workspace(disk).call(name, arguments) == Workspace(memory).call(name, arguments)
