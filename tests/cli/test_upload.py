"""Which files `polar run` sends along, and where they lie in the workspace."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from polar.cli.upload import (
    INLINE_BYTES,
    INLINE_TOTAL,
    CannotUpload,
    argument_files,
    folders_among,
    merge,
    prepare_actions,
    tree_files,
)
from polar.schemas import Claim, PrepareAction


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def made(path: Path, data: bytes = b"x", mode: int = 0o644) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    path.chmod(mode)
    return path


class Keeper:
    """The blob store of a client."""

    def __init__(self) -> None:
        self.kept: list[bytes] = []

    async def keep(self, data: bytes) -> Claim:
        self.kept.append(data)
        return Claim(sha256="0" * 64, size=len(data), uri="x")


async def actions(files: dict[str, Path]) -> tuple[list[PrepareAction], Keeper]:
    keeper = Keeper()
    return await prepare_actions(keeper, files), keeper  # type: ignore[arg-type]


def test_a_file_of_the_command_keeps_its_path_below_the_current_folder(here: Path) -> None:
    made(here / "agents" / "a b.py")
    words, files = argument_files(["python", "agents/a b.py", "--flag", "value"])
    assert words == ["python", "agents/a b.py", "--flag", "value"]
    assert {name: path.resolve() for name, path in files.items()} == {"agents/a b.py": here / "agents" / "a b.py"}


def test_absolute_and_roundabout_names_of_one_file_are_one_place(here: Path) -> None:
    made(here / "a.py")
    words, files = argument_files(["python", str(here / "a.py"), "./a.py", "../here/a.py"])
    assert words == ["python", "a.py", "a.py", "a.py"]
    assert list(files) == ["a.py"]


def test_a_file_from_elsewhere_lies_in_the_workspace_itself(here: Path, tmp_path: Path) -> None:
    made(tmp_path / "elsewhere" / "a.py")
    assert argument_files(["python", "../elsewhere/a.py"])[0] == ["python", "a.py"]
    assert argument_files(["python", str(tmp_path / "elsewhere" / "a.py")])[0] == ["python", "a.py"]


def test_a_program_of_the_users_is_sent_and_one_of_the_system_is_not(here: Path, tmp_path: Path) -> None:
    made(here / "bin" / "agent", mode=0o755)
    assert argument_files(["bin/agent", "/etc/passwd"])[0] == ["./bin/agent", "/etc/passwd"]
    assert argument_files(["/bin/sh", "-c", "true"]) == (["/bin/sh", "-c", "true"], {})
    made(here / "sh")
    assert argument_files(["sh"]) == (["sh"], {}), "a name without a slash is looked for on PATH"


def test_the_python_of_a_virtual_environment_is_not_sent(here: Path) -> None:
    made(here / "env" / "pyvenv.cfg")
    made(here / "env" / "bin" / "python", mode=0o755)
    assert argument_files(["env/bin/python", "-V"]) == (["env/bin/python", "-V"], {})


def test_a_project_inside_an_environments_folder_is_the_users_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(tmp_path / "env" / "pyvenv.cfg")
    made(tmp_path / "env" / "project" / "a.py")
    monkeypatch.chdir(tmp_path / "env" / "project")
    assert list(argument_files(["python", "a.py"])[1]) == ["a.py"]


def test_files_behind_the_equals_sign_of_an_option_are_sent(here: Path, tmp_path: Path) -> None:
    made(tmp_path / "conf.yaml")
    words, files = argument_files(["agent", "--config=../conf.yaml", "-o=nothing", "a=b"])
    assert words == ["agent", "--config=conf.yaml", "-o=nothing", "a=b"]
    assert list(files) == ["conf.yaml"]


def test_two_files_for_one_place_are_refused(here: Path, tmp_path: Path) -> None:
    made(here / "a.py")
    made(tmp_path / "a.py")
    with pytest.raises(CannotUpload, match=r"both lie at a\.py"):
        argument_files(["python", "a.py", "../a.py"])
    files = {"a.py": here / "a.py"}
    merge(files, {"a.py": Path("a.py")})
    with pytest.raises(CannotUpload):
        merge(files, {"a.py": tmp_path / "a.py"})


def test_odd_words_of_a_command_are_words(here: Path) -> None:
    made(here / "-x")
    made(here / "new\nline")
    long = "x" * 5_000
    words, files = argument_files(["agent", "", long, "-x", "new\nline", "*"])
    assert words == ["agent", "", long, "-x", "new\nline", "*"]
    assert set(files) == {"-x", "new\nline"}


def test_a_name_that_is_not_utf8_is_refused_by_name(here: Path) -> None:
    name = os.fsdecode(b"caf\xe9.py")
    made(here / name)
    with pytest.raises(CannotUpload, match=r"not UTF-8: b'caf\\xe9\.py'"):
        argument_files(["python", name])
    with pytest.raises(CannotUpload, match="not UTF-8"):
        tree_files(Path("."))


def test_a_link_to_a_file_is_sent_as_the_file(here: Path, tmp_path: Path) -> None:
    made(tmp_path / "real", b"content")
    (here / "link").symlink_to(tmp_path / "real")
    files, _ = tree_files(Path("."))
    assert files["link"].read_bytes() == b"content"
    assert argument_files(["cat", "link"])[0] == ["cat", "link"]


def test_a_folder_keeps_its_place_and_what_no_session_needs_is_left_out(here: Path, tmp_path: Path) -> None:
    for name in ("a.py", "b/c.txt", ".git/config", "b/__pycache__/c.pyc", ".venv/x", ".env", "state/token-secret"):
        made(here / "src" / name)
    files, skipped = tree_files(Path("src"), private=[here / "src" / "state"])
    assert set(files) == {"src/a.py", "src/b/c.txt", "src/.env"}
    assert skipped == []
    assert set(tree_files(here / "src" / "b")[0]) == {"src/b/c.txt"}
    assert set(tree_files(Path("./src/a.py"))[0]) == {"src/a.py"}
    made(tmp_path / "data" / "x" / "1")
    assert set(tree_files(Path("../data"))[0]) == {"data/x/1"}
    assert {"src/a.py", "src/b/c.txt"} <= set(tree_files(Path("."))[0])


def test_what_was_asked_for_and_cannot_be_sent_is_told(here: Path) -> None:
    made(here / "f" / "a")
    (here / "f" / "broken").symlink_to("nowhere")
    (here / "f" / "loop").symlink_to(here)
    os.mkfifo(here / "f" / "pipe")
    files, skipped = tree_files(Path("f"))
    assert set(files) == {"f/a"}
    assert len(skipped) == 3
    assert any("f/loop is a link to a folder" in line for line in skipped)


def test_a_missing_file_and_too_many_files_are_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CannotUpload, match="neither a file nor a folder"):
        tree_files(Path("nothing"))
    for number in range(4):
        made(here / str(number))
    monkeypatch.setattr("polar.cli.upload.MOST_FILES", 3)
    with pytest.raises(CannotUpload, match="more than 3 files"):
        tree_files(Path("."))


def test_folders_of_a_command_are_noticed_but_for_the_current_one(here: Path) -> None:
    (here / "data").mkdir()
    assert folders_among(["agent", "data", ".", "..", "-d", "/etc", "none"]) == ["data"]


async def test_short_text_travels_in_the_task_and_the_rest_as_blobs(here: Path) -> None:
    files = {
        "text": made(here / "text", "grüße\r\n".encode()),
        "empty": made(here / "empty", b""),
        "binary": made(here / "binary", b"\xff\xfe"),
        "null": made(here / "null", b"a\0b"),
        "long": made(here / "long", b"x" * (INLINE_BYTES + 1)),
    }
    found, keeper = await actions(files)
    assert [(one.target, one.content) for one in found if one.blob is None] == [("text", "grüße\r\n"), ("empty", "")]
    assert keeper.kept == [b"\xff\xfe", b"a\0b", b"x" * (INLINE_BYTES + 1)]
    assert all(one.type == "upload_file" and (one.content is None) != (one.blob is None) for one in found)


async def test_many_short_files_do_not_swell_the_task(here: Path) -> None:
    files = {str(number): made(here / str(number), b"x" * 10_000) for number in range(20)}
    found, _ = await actions(files)
    assert sum(len(one.content or "") for one in found) <= INLINE_TOTAL


async def test_executables_are_made_executable_by_few_commands(here: Path) -> None:
    files = {name: made(here / name, mode=0o755) for name in ("a b", "-x", "it's")}
    files |= {"plain": made(here / "plain")}
    found, _ = await actions(files)
    (chmod,) = [one for one in found if one.type == "exec"]
    assert chmod.command == "chmod +x './a b' ./-x './it'\"'\"'s'"
    many = {f"{number:0200}": made(here / f"{number:0200}", mode=0o755) for number in range(400)}
    found, _ = await actions(many)
    commands = [one.command or "" for one in found if one.type == "exec"]
    assert max(map(len, commands)) < 64 * 1024
    assert sum(command.count("./") for command in commands) == 400


async def test_too_many_bytes_are_refused_before_they_are_read(here: Path) -> None:
    sparse = here / "huge"
    with sparse.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(CannotUpload, match="larger than 256 MiB"):
        await actions({"huge": sparse})


async def test_an_unreadable_file_is_named(here: Path) -> None:
    with pytest.raises(CannotUpload, match=r"cannot read .*gone"):
        await actions({"gone": here / "gone"})
