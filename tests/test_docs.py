"""The documentation says what is so: its Python runs, its links lead somewhere, its lists of options are whole."""

from __future__ import annotations

import contextlib
import gc
import inspect
import io
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import penstock.storage.resolve
from penstock import DistributedDataLoader, ImageDecoder, pack
from penstock.cli import COMMANDS, run
from penstock.storage import MemoryStore, Store
from penstock.storage.clients.remote import RemoteStore

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [page for page in PAGES if page.exists()]
LINKED = [*PAGES, *(ROOT / name for name in ("ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"))]
_FENCE = re.compile(r"^```(\w+)?([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def python_blocks(text: str) -> list[tuple[int, str, str]]:
    """(first line's number, what follows the word python, the code) of each block marked ```python."""
    return [
        (text.count("\n", 0, found.start(3)), found[2].strip(), found[3])
        for found in _FENCE.finditer(text)
        if found[1] == "python"
    ]


def slug(heading: str) -> str:
    """The anchor that GitHub gives to a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.fixture(scope="module")
def object_stores() -> Iterator[None]:
    """Cloud and web URLs lead into memory, after their options were read as for the real store; and hold small data."""
    real = penstock.storage.resolve.open_client

    def open_client(url: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> Store:
        scheme, mark, rest = os.fspath(url).partition("://")
        if not mark or scheme in ("file", "mem", "memory"):
            return real(url, storage_options)
        RemoteStore(os.fspath(url), storage_options).close()
        return MemoryStore(f"mem://docs-{scheme}-{rest}")

    patch = pytest.MonkeyPatch()
    patch.setattr(penstock.storage.resolve, "open_client", open_client)
    _make_data()
    yield
    patch.undo()


def _make_data() -> None:
    cv2 = pytest.importorskip("cv2", reason="install penstock[images]")
    rng = np.random.default_rng(0)
    photos = [
        {
            "__key__": f"{i:06d}",
            "jpg": bytes(cv2.imencode(".jpg", rng.integers(0, 255, (40 + i % 9, 48, 3), np.uint8))[1]),
            "cls": i % 10,
        }
        for i in range(120)
    ]
    clicks = [
        {"user": i % 977, "item": i * 7 % 50021, "price": i % 100 / 4, "clicked": int(i % 9 == 0)}
        for i in range(20_000)
    ]
    tokens = [np.append(rng.integers(1, 50_000, 999), 0) for _ in range(50)]
    for root in ("s3-bucket", "s3-public", "gs-bucket", "az-container", "https-example.org"):
        pack(photos, f"mem://docs-{root}/train/", shard_bytes=150_000)
    pack(photos, "mem://docs-s3-bucket/imagenet/train/")
    pack(clicks, "mem://docs-s3-bucket/clicks/", format="parquet", shard_bytes=60_000)
    pack(tokens, "mem://docs-s3-bucket/tokens/", format="tokens", seq_len=100)
    for name, count in (("web", 300), ("code", 90)):
        pack(({"text": f"{name} {i}"} for i in range(count)), f"mem://docs-s3-bucket/{name}/", format="parquet")


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
@pytest.mark.usefixtures("object_stores")
def test_every_python_block_of_the_documentation_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    _write_sources(tmp_path)
    names: dict[str, Any] = {"__name__": "example"}
    for line, mark, code in python_blocks(page.read_text()):
        if mark == "no-run":
            continue
        if not torch.cuda.is_available():
            code = code.replace('device="cuda"', "device=None")
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile("\n" * line + code, str(page), "exec"), names)
    for value in names.values():
        if isinstance(value, DistributedDataLoader):
            value.close()
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)  # what a page set; monkeypatch would put it back at the end
    names.clear()
    gc.collect()


def _write_sources(folder: Path) -> None:
    """What the examples pack."""
    for kind in ("ants", "bees"):
        (folder / "photos" / kind).mkdir(parents=True)
        for i in range(3):
            (folder / "photos" / kind / f"{i}.txt").write_text(f"{kind} {i}")
    (folder / "clicks.csv").write_text("user,price\n" + "".join(f"{i},{i / 4}\n" for i in range(50)))
    lines = [json.dumps({"text": f"document {i} of a small corpus"}) for i in range(50)]
    (folder / "docs.jsonl").write_text("\n".join(lines))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_is_not_run_says_why(page: Path) -> None:
    text = page.read_text()
    for found in _FENCE.finditer(text):
        if found[1] == "python":
            assert found[2].strip() in ("", "no-run"), found[0]
        if found[1] == "python" and found[2].strip() == "no-run":
            before = text[: found.start()].rstrip().rpartition("\n")[2]
            assert re.fullmatch(r"<!-- no-run: .+ -->", before), found[0]


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_within_the_documentation_leads_somewhere(page: Path) -> None:
    prose = _FENCE.sub("", page.read_text())
    for link in _LINK.findall(prose):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = page if not path else (page.parent / path).resolve()
        assert target.exists(), f"{page.name}: {link}"
        if anchor and target.suffix == ".md":
            headings = re.findall(r"^#+ (.+)$", _FENCE.sub("", target.read_text()), re.MULTILINE)
            assert anchor in {slug(heading) for heading in headings}, f"{page.name}: {link}"


@pytest.mark.parametrize(
    ("kind", "page"),
    [(DistributedDataLoader, "loader.md"), (ImageDecoder, "decoding.md")],
    ids=["DistributedDataLoader", "ImageDecoder"],
)
def test_every_argument_has_a_row_in_its_page_with_its_default(kind: type, page: str) -> None:
    parameters = inspect.signature(kind).parameters
    table = (ROOT / "docs" / page).read_text().partition("\n| argument | default |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| (`[^|]+) \|([^|]*)\|", table, re.MULTILINE)
    defaults = {name: default.strip(" `") for names, default in rows for name in re.findall(r"`(\w+)`", names)}
    assert set(parameters) == set(defaults)
    for name, parameter in parameters.items():
        told = eval(defaults[name], {}) if defaults[name] else inspect.Parameter.empty
        assert repr(told) == repr(parameter.default), name


# The sections of the command lines' page that tables of options stand in, and the commands whose help they are about.
SECTIONS = {f"penstock {name}": [[name]] for name in COMMANDS}
SECTIONS["penstock state"] = [["state", "show"], ["state", "skip"]]
SECTIONS["penstock bench --quick"] = [["bench", "--quick"]]
_OPTION = r"--[a-z][a-z0-9-]*"


def section_of(heading: str) -> str:
    """What stands below a heading of the page, up to the next of that level or of another command; without examples."""
    found, is_inside = "", False
    for line in _FENCE.sub("", (ROOT / "docs" / "cli.md").read_text()).splitlines():
        title = line.lstrip("#").strip()
        if line.startswith("## ") or (line.startswith("#") and title in SECTIONS):
            is_inside = title == heading
        elif is_inside:
            found += line + "\n"
    return found


def named_in(text: str) -> set[str]:
    return set(re.findall(rf"`({_OPTION})", text))


def options_in_tables(section: str) -> set[str]:
    return named_in("\n".join(re.findall(r"^\| ([^|]*) \|", section, re.MULTILINE)))


def options_of(command: list[str], capsys: pytest.CaptureFixture[str]) -> set[str]:
    """What ``--help`` lists, but for itself."""
    with pytest.raises(SystemExit):
        run([*command, "--help"])
    options = set(re.findall(rf"^[│ ] ({_OPTION})", capsys.readouterr().out, re.MULTILINE))
    assert "--json" in options, "every command has it"
    return options


def common_options(command: list[str]) -> set[str]:
    """Those of a command that the page's section of common options is about."""
    common = options_in_tables(section_of("Common options"))
    if command[0] in ("pack", "export"):
        return set()
    if command[0] in ("audit", "top", "report", "state") or command == ["bench", "--quick"]:
        return {"--json"}
    return common if command[0] in ("index", "verify") else common - {"--threads"}


def test_every_command_has_a_section_in_the_command_lines_page() -> None:
    headings = re.findall(r"^##+ (.+)$", (ROOT / "docs" / "cli.md").read_text(), re.MULTILINE)
    assert set(SECTIONS) <= set(headings)


@pytest.mark.parametrize("heading", SECTIONS)
def test_the_options_of_a_command_are_those_of_its_section_and_the_common_ones(
    heading: str, capsys: pytest.CaptureFixture[str]
) -> None:
    section, options = section_of(heading), set()
    for command in SECTIONS[heading]:
        own, common = options_of(command, capsys), common_options(command)
        assert common <= own, command
        assert own - common <= named_in(section), command
        options |= own
    assert options_in_tables(section) <= options
